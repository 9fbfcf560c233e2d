"""The signals that ask a run to save and stop. Nothing heavy is imported, so that the launcher starts at once."""

import signal


def stopping_signals() -> list[signal.Signals]:
    """SIGINT, SIGTERM and SIGHUP, which is sent when a terminal or connection is lost.

    SIGHUP is left out where it does not exist (Windows), and where this process ignores it, as under `nohup`.
    """
    signals = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        signals.append(hangup)
    return signals
