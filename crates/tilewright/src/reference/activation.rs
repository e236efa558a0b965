//! Gated activations of one element in f64, from their definitions.

use crate::activation::Activation;
use std::f64::consts::{PI, SQRT_2};

/// `act(gate) · factor`
pub fn act_and_mul(activation: Activation, gate: f64, factor: f64) -> f64 {
    let activated = match activation {
        Activation::Silu => gate * (1.0 / (1.0 + (-gate).exp())),
        Activation::Gelu => gate * normal_distribution(gate),
        Activation::GeluTanh => {
            gate / 2.0 * one_plus_tanh((2.0 / PI).sqrt() * (gate + 0.044715 * gate.powi(3)))
        }
    };
    activated * factor
}

/// `1 + tanh(u)`, without cancellation for negative `u`.
fn one_plus_tanh(u: f64) -> f64 {
    if u < 0.0 { 2.0 * (2.0 * u).exp() / ((2.0 * u).exp() + 1.0) } else { 1.0 + u.tanh() }
}

/// The CDF of the standard normal distribution.
fn normal_distribution(x: f64) -> f64 {
    let tail = erfc(x.abs() / SQRT_2) / 2.0;
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// `erfc(x)` for `x >= 0`: Abramowitz and Stegun 7.1.6 (a series of positive terms) near 0, 7.1.14 (a continued
/// fraction) beyond.
fn erfc(x: f64) -> f64 {
    let scale = (-x * x).exp() / PI.sqrt();
    if x < 2.0 {
        let (mut term, mut sum) = (2.0 * x, 0.0);
        for n in 1..200 {
            sum += term;
            term *= 2.0 * x * x / f64::from(2 * n + 1);
        }
        1.0 - scale * sum
    } else {
        let fraction = (1..200).rev().fold(x, |tail, n| x + f64::from(n) / 2.0 / tail);
        scale / fraction
    }
}
