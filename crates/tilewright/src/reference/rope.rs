//! Rotary embedding of one head in f64: each pair is a complex number, multiplied by `e^(i·angle)`.

use crate::rope::RopeStyle;
use std::f64::consts::PI;

/// The unscaled frequency of a pair: `theta^(-2·pair/rotary_dim)` radians per position.
pub fn frequency(pair: usize, rotary_dim: usize, theta: f64) -> f64 {
    (-(2.0 * pair as f64) / rotary_dim as f64 * theta.ln()).exp()
}

/// `frequency` with Llama 3.1's scaling, in terms of wavelengths as published; `factors` are the scaling factor and
/// the low and high frequency factors.
pub fn llama31_frequency(frequency: f64, factors: (f64, f64, f64), original_context: f64) -> f64 {
    let (factor, low, high) = factors;
    let wavelength = 2.0 * PI / frequency;
    if wavelength < original_context / high {
        frequency
    } else if wavelength > original_context / low {
        frequency / factor
    } else {
        let smooth = (original_context / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

/// Rotates `head`, `[head_dim]`, whose first `2 · angles.len()` elements are pairs; `angles` in radians.
pub fn rotate(head: &[f64], angles: &[f64], style: RopeStyle) -> Vec<f64> {
    let mut out = head.to_vec();
    for (pair, angle) in angles.iter().enumerate() {
        let (re, im) = match style {
            RopeStyle::Neox => (pair, pair + angles.len()),
            RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
        };
        let (radius, phase) = (head[re].hypot(head[im]), head[im].atan2(head[re]));
        out[re] = radius * (phase + angle).cos();
        out[im] = radius * (phase + angle).sin();
    }
    out
}
