#!/usr/bin/env bash
# jax.checkpoint around each block of a loop recomputes nothing and saves no memory on a CPU; around the body of a scan it does.
#
# Version: JAX 0.10.2 with jaxlib 0.10.2. Seen on 2026-11-30.
# Guess: prevent_cse=True, the default, puts barriers into the program, so backward runs eight products again on any device.
# Seen: the program given to XLA has 8 products more and 8 barriers. The compiled program has as many products as without
# jax.checkpoint, and takes as much temporary memory: XLA's compiler for CPUs drops the barriers, then merges equal products. So
# memory that was measured on a CPU says nothing about these checkpoints on an accelerator. A scan keeps forward and backward in
# two loops, whose bodies are not merged.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp

LAYERS, WIDTH, TOKENS = 8, 64, 256
x = jnp.ones((TOKENS, WIDTH))
stacked = jax.random.normal(jax.random.key(0), (LAYERS, 2, WIDTH, WIDTH)) / WIDTH
pairs = [(up, down) for up, down in stacked]


def block(x, up, down):
    return x + jnp.sin(x @ up) @ down


def unrolled(part, weights):
    y = x
    for up, down in weights:
        y = part(y, up, down)
    return jnp.sum(y * y)


def scanned(part, weights):
    y, _ = jax.lax.scan(lambda y, pair: (part(y, *pair), None), x, weights)
    return jnp.sum(y * y)


def measure(model, part, weights):
    lowered = jax.jit(jax.value_and_grad(lambda weights: model(part, weights))).lower(weights)
    text, compiled = lowered.as_text(), lowered.compile()
    products = compiled.cost_analysis()["flops"] / (2 * TOKENS * WIDTH * WIDTH)
    values = compiled.memory_analysis().temp_size_in_bytes / (4 * TOKENS * WIDTH)
    print(
        f"{model.__name__}, {part.__name__}: {text.count('stablehlo.dot_general')} products and "
        f"{text.count('optimization_barrier')} barriers given to XLA; "
        f"{products:.1f} products compiled, {values:.1f} activations in temporary memory"
    )
    return text.count("stablehlo.dot_general"), text.count("optimization_barrier"), products, values


checkpointed = jax.checkpoint(block)
checkpointed.__name__ = "checkpointed block"
plain, again = measure(unrolled, block, pairs), measure(unrolled, checkpointed, pairs)
assert again[0] == plain[0] + LAYERS and again[1] >= LAYERS
assert abs(again[2] - plain[2]) < 1 and again[3] > 0.9 * plain[3]
plain, again = measure(scanned, block, stacked), measure(scanned, checkpointed, stacked)
assert again[3] < 0.7 * plain[3]
PY
