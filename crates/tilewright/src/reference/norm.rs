//! Norms of one row in f64, from their definitions.

/// `x · (offset + weight) / sqrt(mean(x²) + eps)`; `x` and `weight` are `[hidden]`.
pub fn rmsnorm(x: &[f64], weight: &[f64], offset: f64, eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x.powi(2)).sum::<f64>() / x.len() as f64;
    let deviation = (mean + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| x / deviation * (offset + w)).collect()
}

/// `(x - mean(x)) · (offset + weight) / sqrt(var(x) + eps) + bias` with the biased variance; `x`, `weight` and `bias` are `[hidden]`.
pub fn layer_norm(x: &[f64], weight: &[f64], offset: f64, bias: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let centered: Vec<f64> = x.iter().map(|x| x - mean).collect();
    rmsnorm(&centered, weight, offset, eps).iter().zip(bias).map(|(y, bias)| y + bias).collect()
}
