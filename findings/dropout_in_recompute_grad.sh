#!/usr/bin/env bash
# On TensorFlow, the gradient through dropout in tf.recompute_grad or keras.remat is wrong, without a message; on JAX it is right.
#
# Version: tensorflow-cpu 2.21.0, keras 3.15.1, jax 0.10.2. Seen on 2026-11-30.
# Guess: keras.remat gives one Keras model the same gradient on each back end; a fixed seed makes recomputation draw forward's mask.
# Seen: on TensorFlow, the outputs are the same and the gradients are not, for Keras's Dropout with a seed and for tf.nn.dropout, in
# eager mode and in tf.function. keras.remat is tf.recompute_grad there, which calls the function again and restores no random state.
# Keras's seed only chooses where a sequence of masks starts. tf.nn.dropout with a seed is right in tf.function, where forward's
# operator and its copy count apart from the same seed, and wrong in eager mode. tf.random.stateless_uniform is right in both.
# On JAX, jax.checkpoint runs a traced program again, whose keys are values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensorflow-cpu==2.21.0 keras==3.15.1 jax==0.10.2 jaxlib==0.10.2
cat >"$folder/program.py" <<'PY'
import keras
import numpy as np

x = np.ones((4, 64), "float32")
BACKEND = keras.backend.backend()


def gradient(draw, kept, compiled):
    """Output and gradient of sin(2 * draw(x)), computed again in backward or not."""
    keras.utils.set_random_seed(0)
    noise = draw()
    function = lambda v: keras.ops.sin(2 * noise(v))
    function = keras.remat(function) if kept else function
    if BACKEND == "jax":
        import jax

        step = jax.value_and_grad(lambda v: (lambda y: (y.sum(), y))(function(v)), has_aux=True)
        (_, y), g = (jax.jit(step) if compiled else step)(jax.numpy.asarray(x))
        return np.asarray(y), np.asarray(g)
    import tensorflow as tf

    def step(v):
        with tf.GradientTape() as tape:
            tape.watch(v)
            y = function(v)
        return y, tape.gradient(y, v)

    y, g = (tf.function(step, autograph=False) if compiled else step)(tf.constant(x))
    return y.numpy(), g.numpy()


def dropout():
    layer = keras.layers.Dropout(0.5, seed=7)
    return lambda v: layer(v, training=True)


# Where the gradient is right, in eager mode and compiled.
draws = {"Dropout(seed=7)": (dropout, [BACKEND == "jax"] * 2)}
if BACKEND == "tensorflow":
    import tensorflow as tf

    draws["tf.nn.dropout"] = (lambda: lambda v: tf.nn.dropout(v, 0.5), [False, False])
    draws["tf.nn.dropout(seed=7)"] = (lambda: lambda v: tf.nn.dropout(v, 0.5, seed=7), [False, True])
    draws["stateless_uniform"] = (lambda: lambda v: v * tf.random.stateless_uniform(v.shape, (7, 7)), [True, True])
for name, (draw, right) in draws.items():
    for compiled in (False, True):
        expected, found = gradient(draw, False, compiled), gradient(draw, True, compiled)
        same = [np.allclose(a, b, atol=1e-5) for a, b in zip(expected, found)]
        print(BACKEND, name, "compiled" if compiled else "eager", "same output and gradient:", same)
        assert same == [True, right[compiled]]
PY
for backend in tensorflow jax; do
    KERAS_BACKEND=$backend TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" -W ignore "$folder/program.py"
done
