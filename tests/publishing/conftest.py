import shutil
from pathlib import Path

import pytest
import torch
from hub_server import HubServer
from huggingface_hub import constants
from huggingface_hub.utils import _http, close_session
from publishing_material import SENTENCES, TINY, TOKEN

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.cli import main
from vanilla_transformer.publishing.upload import Hub


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A model without a run; tests do not change it."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = VanillaTransformerConfig(
        vocab_size=261, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    VanillaTransformerTokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(model_folder, tmp_path):
    """A copy of the model that a test may change."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A finished run; tests do not change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    files = [str(path) for path in SENTENCES]
    arguments = ["train", "--train_files", *files, "--valid_files", *files, "--output_dir", str(folder)]
    assert main([*arguments, *TINY, "--max_updates", "8", "--save_every", "2"]) == 0
    return folder


@pytest.fixture
def server():
    with HubServer({TOKEN: ["user", "team"], "hf_tokenofanother": ["another"]}) as server:
        yield server


@pytest.fixture
def online(server, monkeypatch, tmp_path):
    """Have this process speak to the server, with the user's token; waits take no time, and are noted."""
    waits = []

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            waits.append(seconds)

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(_http, "time", Clock)
    # Outside of the home folder, of which pytest's own may be a part.
    monkeypatch.setattr(Hub.__init__, "__defaults__", (waits.append,))
    close_session()
    yield waits
    close_session()


@pytest.fixture
def refused(call):
    """Call the command line with a mistake; returns the sentence about it."""

    def refused(*arguments):
        status, out, err = call(*arguments)
        assert status in (1, 2), err
        assert out == "" and "Traceback" not in err
        return [line for line in err.replace("\r", "\n").splitlines() if line.startswith("vanilla-transformer")][-1]

    return refused
