"""Programs of complex numbers: Fourier transforms, conjugates, and views of the same memory as real and as complex."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

T = torch.Tensor
#: A program of a real scalar, and of a real tensor whose last dimension holds real and imaginary parts.
Program = Callable[[T, T], T]
_real, _complex, _fft = torch.view_as_real, torch.view_as_complex, torch.fft


def scaled_and_viewed(s: T, x: T) -> T:
    z = _complex(x.sin())
    return (_real(s * z) ** 2).sum() + (_real(z) ** 2).sum()


def scaled_spectrum(s: T, x: T) -> T:
    z = _fft.rfft(x[..., 0])
    return _fft.irfft(s * z).square().sum() + _real(z).square().sum()


def product_of_views(s: T, x: T) -> T:
    z = torch.complex(x[..., 0].sin(), x[..., 1].cos())
    return (_real(s * z).sin() * _real(z)).sum()


def scaled_input(s: T, x: T) -> T:
    z = _complex(x)
    return _real(s * z).sin().sum() + _real(z).cos().sum()


def two_transforms(s: T, x: T) -> T:
    z = _fft.fft2(_complex(x.sin()))
    return _real(_fft.ifft2(z * s) * z).sin().sum()


def parts_and_whole(s: T, x: T) -> T:
    z = _complex(x.exp())
    return (z.real.sin() * z.imag * s).sum() + _real(z * s).sin().sum()


def conjugated(s: T, x: T) -> T:
    z = _complex(x.sin())
    return (z.conj() * z * s).real.sum() + _real(z).cos().sum()


def conjugated_twice(s: T, x: T) -> T:
    z = _complex(x.sin()) * s
    return _real(z.conj().sin().conj().resolve_conj()).square().sum() + _real(z).exp().sum()


def hermitian(s: T, x: T) -> T:
    z = _complex(x.sin())
    return _real(s * (z @ z.mH)).sin().sum() + _real(z).square().sum()


def rotary(s: T, x: T) -> T:
    angles = torch.arange(x.shape[1]).float()[None] * s
    turned = _complex(x.sin()) * torch.polar(torch.ones_like(angles), angles)
    return (_real(turned).flatten(1) @ x.flatten(1).T).sin().sum()


def amplitude_and_phase(s: T, x: T) -> T:
    z = _complex(x.cos()) * s
    return (z.abs().sin() * z.angle().cos()).sum() + _real(z).sin().sum()


def spectral_layer(s: T, x: T) -> T:
    z = _fft.rfft(x[..., 0].tanh(), norm="ortho")
    kept = z[:, :5] * _complex(x[:, :5].contiguous()) * s
    return _fft.irfft(kept, n=x.shape[1], norm="ortho").tanh().sum() + _real(z).sin().sum()


def transformed_in_two_axes(s: T, x: T) -> T:
    z = _fft.rfft2(x[..., 0] * s)
    return _fft.irfft2(z * z.conj()).sin().sum() + _real(z).square().sum().sqrt()


def shifted(s: T, x: T) -> T:
    z = _fft.fftshift(_fft.fft(_complex(x.sin())), dim=-1)
    return (_real(z * s).cos() * _real(z)).sum()


def many_views(s: T, x: T) -> T:
    z = _complex(x.sin())
    halves = _real(z).unbind(-1)
    return (halves[0] * _real(s * z)[..., 1].sin()).sum() + (halves[1] * z.T.real).sum()


def written_parts(s: T, x: T) -> T:
    z = _complex(x.sin()).clone()
    z.real.mul_(s)
    return _real(z).sin().sum() + (z * z).imag.sum()


def written_whole(s: T, x: T) -> T:
    z = _complex(x.sin()).clone()
    y = _real(z).exp()
    z.mul_(2j)
    return (_real(z * s) * y).sum()


def powers(s: T, x: T) -> T:
    z = _complex(x.sin()) + 2
    return _real(z**2 * s + z.reciprocal()).sin().sum() + _real(z).square().log1p().sum()


def exponentials(s: T, x: T) -> T:
    z = _complex(x.sin()) * s
    return _real(z.exp() * z.tanh()).sum() + _real(z).square().mean()


def solved(s: T, x: T) -> T:
    z = _complex(x.sin())
    system = z @ z.mH + torch.eye(len(x))
    return _real(torch.linalg.solve(system, z * s)).sin().sum() + _real(z).cos().sum()


PROGRAMS: Mapping[str, Program] = {
    program.__name__: program
    for program in (
        scaled_and_viewed,
        scaled_spectrum,
        product_of_views,
        scaled_input,
        two_transforms,
        parts_and_whole,
        conjugated,
        conjugated_twice,
        hermitian,
        rotary,
        amplitude_and_phase,
        spectral_layer,
        transformed_in_two_axes,
        shifted,
        many_views,
        written_parts,
        written_whole,
        powers,
        exponentials,
        solved,
    )
}


def inputs() -> tuple[T, T]:
    """The scalar and the tensor, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 16, 2, generator=generator)
    return torch.tensor(0.75, requires_grad=True), x.requires_grad_()


def gradients(program: Program) -> list[T]:
    """The loss of a step and both gradients."""
    given = inputs()
    loss = program(*given)
    loss.backward()
    return [loss.detach(), *(value.grad for value in given if value.grad is not None)]
