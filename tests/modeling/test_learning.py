import pytest
import torch
from tiny_models import BOS, EOS, padded, tiny_config

from vanilla_transformer import VanillaTransformerForConditionalGeneration


FIRST_DIGIT = 5
LONGEST = 7


def digit_strings(number: int, *, held_out: bool, generator: torch.Generator) -> list[list[int]]:
    """Strings of four to seven digits; those whose sum is divisible by five are never trained on."""
    strings = []
    while len(strings) < number:
        lengths = torch.randint(4, LONGEST + 1, (number,), generator=generator).tolist()
        digits = torch.randint(0, 10, (number, LONGEST), generator=generator).tolist()
        drawn = (row[:length] for row, length in zip(digits, lengths, strict=True))
        strings += [string for string in drawn if (sum(string) % 5 == 0) == held_out]
    return strings[:number]


def as_ids(string: list[int]) -> list[int]:
    return [FIRST_DIGIT + digit for digit in string] + [EOS]


def share_learnt(transform, seed: int) -> float:
    """Train on `transform` and return the share of held-out strings that greedy search gets exactly right."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    config = tiny_config(
        vocab_size=FIRST_DIGIT + 10,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
    )
    model = VanillaTransformerForConditionalGeneration(config).train()
    steps, warmup = 600, 150
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1 - step / steps))
    for _ in range(steps):
        strings = digit_strings(96, held_out=False, generator=generator)
        sources = [as_ids(string) for string in strings]
        output = model(
            input_ids=padded(sources),
            attention_mask=padded([[1] * len(source) for source in sources], 0),
            labels=padded([as_ids(transform(string)) for string in strings], -100),
        )
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        schedule.step()

    strings = digit_strings(500, held_out=True, generator=generator)
    sources = [as_ids(string) for string in strings]
    generated = model.eval().generate(
        padded(sources),
        attention_mask=padded([[1] * len(source) for source in sources], 0),
        max_new_tokens=LONGEST + 2,
        do_sample=False,
    )
    right = 0
    for string, ids in zip(strings, generated.tolist(), strict=True):
        wanted = [BOS, *as_ids(transform(string))]
        right += ids[: len(wanted)] == wanted and not any(ids[len(wanted) :])
    return right / len(strings)


@pytest.mark.parametrize("transform", [list, lambda string: string[::-1]], ids=["copy", "reverse"])
def test_a_model_learns(transform):
    # A seed from the operating system: learning must not hang on luck.
    seed = torch.seed() % 2**32
    assert share_learnt(transform, seed) >= 0.99, f"seed {seed}"
