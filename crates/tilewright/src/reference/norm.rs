//! RMSNorm of one row in f64, from its definition.

/// `x · (offset + weight) / sqrt(mean(x²) + eps)`; `x` and `weight` are `[hidden]`.
pub fn rmsnorm(x: &[f64], weight: &[f64], offset: f64, eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x.powi(2)).sum::<f64>() / x.len() as f64;
    let deviation = (mean + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| x / deviation * (offset + w)).collect()
}
