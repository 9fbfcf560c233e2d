"""The signals that ask a run to save and stop. It imports nothing, so that a launcher of processes starts at once."""

import signal


def stopping_signals() -> list[signal.Signals]:
    """SIGINT, SIGTERM and, of a terminal or connection that is lost, SIGHUP.

    SIGHUP is left out where there is none (Windows), and where this process was told to ignore it, as `nohup` does.
    """
    signals = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        signals.append(hangup)
    return signals
