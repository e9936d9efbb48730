#!/usr/bin/env bash
# compile_repeated_blocks of Diffusers raises for 25 of its 65 transformers, Stable Diffusion 3's among them.
#
# Version: Diffusers 0.42.1 with torch 2.13.0. Seen on 2026-11-30.
# Guess: a transformer that is a list of equal blocks compiles its blocks by compile_repeated_blocks().
# Seen: a ValueError for SD3, PixArt, CogVideoX, DiT and others, whose attribute `_repeated_blocks` is an empty list. With the
# class name of the block in that list, the blocks are compiled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy diffusers==0.42.1
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - <<'PY'
import diffusers
import torch

NAMES = [n for n in dir(diffusers) if "Transformer" in n and n.endswith("Model")]
EMPTY = [n for n in NAMES if not getattr(getattr(diffusers, n), "_repeated_blocks", None)]
print(f"without _repeated_blocks: {len(EMPTY)} of {len(NAMES)} transformers")
assert {"SD3Transformer2DModel", "PixArtTransformer2DModel", "DiTTransformer2DModel"} <= {*EMPTY}
assert "FluxTransformer2DModel" not in EMPTY


def compiled_blocks(model):
    try:
        model.compile_repeated_blocks(backend="eager")
    except ValueError as error:
        return str(error)
    return sum(m._compiled_call_impl is not None for m in model.modules())


sizes = dict(num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8)
model = diffusers.DiTTransformer2DModel(**sizes, num_embeds_ada_norm=10)
said = compiled_blocks(model)
model._repeated_blocks = ["BasicTransformerBlock"]
print(f"DiT: {said}\nwith the name of the block: {compiled_blocks(model)} blocks compiled")
assert "`_repeated_blocks` attribute is empty" in said
assert compiled_blocks(model) == 2
PY
