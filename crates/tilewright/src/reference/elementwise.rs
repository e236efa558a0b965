//! Elementwise functions in f64, from their definitions.

use crate::elementwise::ElementFunction;

/// `function(x)`
pub fn map(function: ElementFunction, x: f64) -> f64 {
    match function {
        ElementFunction::Scale { factor } => f64::from(factor) * x,
        ElementFunction::SoftCap { cap } => {
            let power = (2.0 * x.abs() / f64::from(cap)).exp();
            let tanh = if power.is_finite() { (power - 1.0) / (power + 1.0) } else { 1.0 };
            f64::from(cap) * tanh.copysign(x)
        }
    }
}
