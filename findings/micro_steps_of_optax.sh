#!/usr/bin/env bash
# A micro-step of optax.MultiSteps(adam) takes three copies of the parameters as temporary memory, and runs Adam, on a CPU.
#
# Version: optax 0.2.8, jax 0.10.2. Seen on 2026-11-30. Related to issue 472 of Optax.
# Guess: accumulating costs one more copy of the parameters, for the sum of gradients; Adam runs in each k-th step only.
# Seen: beside that sum, each step has temporary memory of three copies, with every_k_schedule=1 too, although parameters and state are
# donated. Adam alone, or a function that only adds up gradients, has none. Every micro-step computes Adam's update, multiplies it by 0,
# and selects the old state with jnp.where. XLA then copies the donated buffers, which old and new values are both made from. A
# step that is written by hand in this way has the same memory; without the selection it has a third of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - <<'PY'
import jax
import jax.numpy as jnp
import optax

LAYERS, WIDTH = 8, 1 << 16
parameters, batch = [jnp.zeros(WIDTH)] * LAYERS, jnp.ones(WIDTH)
SIZE = LAYERS * batch.nbytes


def loss(parameters, batch):
    return sum(jnp.sum(jnp.sin(p * batch)) for p in parameters)


def report(name, step, *donated):
    """Donated and temporary memory of a step, in copies of the parameters, and whether the step computes Adam's square root."""
    compiled = jax.jit(step, donate_argnums=range(len(donated))).lower(*donated, batch).compile()
    memory, root = compiled.memory_analysis(), "sqrt" in compiled.as_text()
    found = [round(size / SIZE, 1) for size in (memory.alias_size_in_bytes, memory.temp_size_in_bytes)]
    print(f"{name}: {found[0]} copies of the parameters donated, {found[1]} temporary", "and a square root" * root)
    return *found, root


def wrapped(optimizer):
    def step(parameters, state, batch):
        updates, state = optimizer.update(jax.grad(loss)(parameters, batch), state, parameters)
        return optax.apply_updates(parameters, updates), state

    return step, parameters, optimizer.init(parameters)


def added(total, batch):
    return [t + g for t, g in zip(total, jax.grad(loss)(parameters, batch))]


def by_hand(select):
    def step(parameters, state, total, micro_step, batch):
        total = [t + (g - t) / (micro_step + 1) for t, g in zip(total, jax.grad(loss)(parameters, batch))]
        updates, new = adam.update(total, state, parameters)
        last = micro_step == 3
        state = jax.tree.map(lambda a, b: jnp.where(last, b, a), state, new) if select else new
        parameters = optax.apply_updates(parameters, [last * u for u in updates])
        return parameters, state, [(1 - last) * t for t in total], (micro_step + 1) % 4

    return step, parameters, adam.init(parameters), parameters, jnp.int32(0)


adam = optax.adam(1e-3)
assert report("Adam", *wrapped(adam)) == (3, 0, True)
assert report("adding up gradients", added, parameters) == (1, 0, False)
for k in (1, 4):
    donated, temporary, root = report(f"MultiSteps(adam, {k})", *wrapped(optax.MultiSteps(adam, k)))
    assert donated == 4 and 2.9 < temporary < 3.3 and root
assert report("by hand, with jnp.where", *by_hand(select=True))[1] > 2.9
assert report("by hand, without jnp.where", *by_hand(select=False))[1] < 1.1
PY
