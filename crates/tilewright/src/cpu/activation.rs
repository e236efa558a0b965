//! CPU gated activations, in forms that keep relative accuracy for large negative gates, for which `1 + tanh` and
//! `1 + erf` cancel.

use crate::{
    Cpu, Element, Rows,
    activation::{Activation, GatedActivation},
    rows_mut, with_computable,
};
use std::f32::consts::FRAC_1_SQRT_2;

pub(super) fn act_and_mul(cpu: &Cpu, operator: GatedActivation<'_>) {
    let GatedActivation { activation, x, out } = operator;
    let d = out.shape()[1];
    with_computable!(x.dtype(), T => {
        let rows = Rows::<T>::new(x);
        with_computable!(out.dtype(), Out => {
            cpu.each_row(rows_mut::<Out>(out), d, || (), |(), row, out| match activation {
                Activation::Silu => gate(rows.get(row), out, silu),
                Activation::Gelu => gate(rows.get(row), out, gelu),
                Activation::GeluTanh => gate(rows.get(row), out, gelu_tanh),
            });
        });
    });
}

/// `out = activation(gates) * factors`
pub(super) fn activate(activation: Activation, gates: &[f32], factors: &[f32], out: &mut [f32]) {
    match activation {
        Activation::Silu => multiply(gates, factors, out, silu),
        Activation::Gelu => multiply(gates, factors, out, gelu),
        Activation::GeluTanh => multiply(gates, factors, out, gelu_tanh),
    }
}

fn gate<T: Element, Out: Element>(x: &[T], out: &mut [Out], activation: impl Fn(f32) -> f32) {
    let (gates, factors) = x.split_at(out.len());
    multiply(gates, factors, out, activation);
}

fn multiply<T: Element, Out: Element>(
    gates: &[T],
    factors: &[T],
    out: &mut [Out],
    activation: impl Fn(f32) -> f32,
) {
    for ((out, gate), factor) in out.iter_mut().zip(gates).zip(factors) {
        *out = Out::from_f32(activation(gate.to_f32()) * factor.to_f32());
    }
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn gelu(x: f32) -> f32 {
    0.5 * x * libm::erfcf(-x * FRAC_1_SQRT_2)
}

/// `(1 + tanh u) / 2 = 1 / (1 + e^-2u)`, so this is `x / (1 + e^-2u)`.
fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    let u = SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x);
    x / (1.0 + (-2.0 * u).exp())
}
