//! Gated activations: `out = act(x[.., ..d]) · x[.., d..]`, computed in f32 and rounded once.
//!
//! Shapes: x `[tokens, 2 d]`, out `[tokens, d]`, tokens any stride apart; of one dtype, aligned to 16 bytes, and so are strides.
//! Strides are in elements. Grid: `[tokens, Gated::ctas_of_token(), 1]`.

use crate::tile::{Packed, Vector};
use std::f32::consts::LOG2_E;
use tilewright_ptx::{
    build::{Builder, Value},
    ir::Kernel,
    isa::memory::Access,
    verify::Invalid,
};

const THREADS: u32 = 128;
/// Vectors of gates, and as many of factors, for a thread.
const EACH: u32 = 2;

/// What is applied to the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`
    Silu,
    /// `x · Φ(x)` with the normal distribution function, to a relative error of 2e-6.
    Gelu,
    /// `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`
    GeluTanh,
}

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gated {
    /// What is applied to the gate.
    pub activation: Activation,
    /// Elements of a token's result.
    pub d: u32,
}

impl Gated {
    /// CTAs for each token and elements `T`.
    pub fn ctas_of_token<T: Packed>(self) -> u32 {
        self.d.div_ceil(T::PER_VECTOR * EACH * THREADS)
    }
}

/// The kernel. Parameters: x, out; x_stride, out_stride (u64).
///
/// # Errors
/// When `d` is not a number of whole vectors.
pub fn act_and_mul<T: Packed>(name: &str, config: Gated) -> Result<Kernel, Invalid> {
    let (d, step) = (config.d, T::PER_VECTOR);
    if d == 0 || !d.is_multiple_of(step) || d > 1 << 30 {
        let why = format!("d = {d}, expected a multiple of {step} in {step}..={}", 1 << 30);
        return Err(Invalid::of(name, why));
    }
    Builder::kernel(name, THREADS, |k| {
        let (x, out) = (k.global::<T>("x"), k.global::<T>("out"));
        let (x_stride, out_stride) = (k.param::<u64>("x_stride"), k.param::<u64>("out_stride"));
        let token = k.cta().to_u64();
        let first = (k.cta_y() * (THREADS * EACH) + k.thread()).named("vector");
        let gates = x.at_wide(token * x_stride).at(first * step);
        let out = out.at_wide(token * out_stride).at(first * step);
        let parts: Vec<_> = (0..EACH)
            .map(|i| {
                let is_there = (first + i * THREADS).lt(d / step);
                let at = (i * THREADS * step) as usize;
                let load = |at: usize| Vector::<T>::load_when(k, is_there, gates.plus(at), Access::Streaming);
                (is_there, at, load(at), load(at + d as usize))
            })
            .collect();
        for (is_there, at, gates, factors) in parts {
            let products: Vec<_> = gates
                .numbers()
                .into_iter()
                .zip(factors.numbers())
                .map(|(gate, factor)| activated(config.activation, gate) * factor)
                .collect();
            let products = Vector::<T>::of(k, &products);
            k.when(is_there, || products.store(out.plus(at)));
        }
    })
}

#[track_caller]
fn activated(activation: Activation, x: Value<'_, f32>) -> Value<'_, f32> {
    match activation {
        Activation::Silu => x * logistic(x * -LOG2_E),
        Activation::Gelu => x * normal_distribution(x),
        Activation::GeluTanh => {
            // (1 + tanh u) / 2 = 1 / (1 + e^-2u), without the cancellation for negative u
            const SQRT_2_OVER_PI: f32 = 0.797_884_6;
            let u = x * (x * x).mul_add(0.044_715, 1.0);
            x * logistic(u * (-2.0 * SQRT_2_OVER_PI * LOG2_E))
        }
    }
}

/// `1 / (1 + 2^x)`
#[track_caller]
fn logistic(x: Value<'_, f32>) -> Value<'_, f32> {
    (x.exp2() + 1.0).recip()
}

/// `Φ(x)`. With `t = 1 / (1 + |x| / 4)`, `Φ(-|x|) = e^(-x²/2) · t · P(t)`, whose P is fitted to a relative error of 1.5e-6 for
/// all x: there is no instruction for erf, and 1 + erf would cancel where x is negative.
#[track_caller]
fn normal_distribution(x: Value<'_, f32>) -> Value<'_, f32> {
    const P: [f32; 8] = [
        -0.039_972_66,
        0.088_425_79,
        0.003_106_406,
        0.076_451_58,
        0.078_837_79,
        0.093_685_77,
        0.099_729_16,
        0.099_735_62,
    ];
    let t = x.abs().mul_add(0.25, 1.0).recip();
    let p = P[1..].iter().fold(t.builder().constant(P[0]), |p, &next| p.mul_add(t, next));
    let tail = (x * x * (-0.5 * LOG2_E)).exp2() * (t * p);
    x.lt(0.0).select(tail, -tail + 1.0)
}
