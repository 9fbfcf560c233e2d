"""What is computed in C++ where there is a compiler, and in torch where there is none that works."""

import re

import pytest
from users import ONE_PROCESS, PROGRAMS, User


# Precision and width of a head for which there are operations in C++; on processors without them, all are torch's.
IN_BF16 = [*ONE_PROCESS, "--mixed_precision", "bf16"]
ONE_HEAD = ["--encoder_attention_heads", "1", "--decoder_attention_heads", "1"]
FAILING = "#!/bin/sh\necho 'internal error' >&2\nexit 1\n"
HANGING = "#!/bin/sh\nexec sleep 1000\n"


@pytest.fixture
def circumstances(user, tmp_path):
    """Variables of an environment in which nothing can be compiled, and the reason that the log then tells."""

    def circumstances(kind: str) -> tuple[dict[str, str], str]:
        if kind == "none":
            folder = tmp_path / "programs"
            folder.mkdir()
            (folder / "vanilla-transformer").symlink_to(PROGRAMS / "vanilla-transformer")
            return {"PATH": str(folder)}, r"there is no C\+\+ compiler \(g\+\+ or clang\+\+\)"
        compiler = tmp_path / "compiler"
        compiler.write_text({"failing": FAILING, "hanging": HANGING}[kind])
        compiler.chmod(0o755)
        reason = {"failing": "internal error", "hanging": "it takes longer than 2 seconds"}[kind]
        bound = {"VANILLA_TRANSFORMER_COMPILE_SECONDS": "2"}
        return {"CXX": str(compiler), **bound}, rf"{compiler} does not compile the \w+ \({reason}\)"

    return circumstances


@pytest.fixture(scope="module")
def in_torch():
    """Digests of the weights that were computed without a compiler."""
    return set()


@pytest.mark.parametrize("kind", ["none", "failing", "hanging"])
def test_without_a_compiler_that_works(user, circumstances, in_torch, kind):
    variables, reason = circumstances(kind)
    err = user.train(*IN_BF16, more=ONE_HEAD, variables=variables)
    clause = rf"fused operations without C\+\+, because {reason}"
    assert re.fullmatch(clause, user.record()["operations"])
    assert len(re.findall(clause, err)) == 1
    in_torch.add(user.digest())
    assert len(in_torch) == 1


@pytest.mark.slow
def test_a_compiler_that_works_changes_the_rounding_alone(user, circumstances, tmp_path):
    # With and without padding, dropout draws other numbers.
    flags = [*ONE_HEAD, "--dropout", "0"]
    user.train(*IN_BF16, more=flags)
    losses, translations = user.losses(), user.translate_file(user.file(""))
    variables, _ = circumstances("none")
    assert user.translate_file(user.file(""), variables=variables) == translations
    without = User(tmp_path / "without")
    without.train(*IN_BF16, more=flags, variables=variables)
    # Numbers in bf16 have 8 bits.
    assert losses == pytest.approx(without.losses(), rel=2**-8)
