//! The scale of a group of numbers that are quantized to 8 bits, in f64, from its definition.

/// `max(max |x|, eps) / limit`, rounded up to a power of two if `power_of_two`; NaN if a number is.
pub fn group_scale(group: &[f64], eps: f64, limit: f64, power_of_two: bool) -> f64 {
    if group.iter().any(|x| x.is_nan()) {
        return f64::NAN;
    }
    let scale = group.iter().fold(eps, |largest, x| largest.max(x.abs())) / limit;
    if !power_of_two || scale.is_infinite() {
        return scale;
    }
    (-126..=128).map(|exponent| 2f64.powi(exponent)).find(|power| *power >= scale).unwrap_or(f64::INFINITY)
}
