import json
from pathlib import Path


TOKEN = "hf_tokenoftheuser"
SENTENCES = tuple(Path(__file__).parents[1] / "data" / f"sentences.{language}" for language in ("en", "de"))
TINY = """
    --d_model 16 --encoder_layers 1 --decoder_layers 1 --encoder_attention_heads 2 --decoder_attention_heads 2
    --encoder_ffn_dim 16 --decoder_ffn_dim 16 --vocab_size 300 --tokens_per_batch 256 --tokens_per_update 256
    --validate_every 4 --valid_bleu_sentences 0 --average_last 2 --num_beams 2 --log_every 1 --trackers none
    --source_language en --target_language de --device cpu --warmup_steps 10
""".split()  # noqa: SIM905


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))
