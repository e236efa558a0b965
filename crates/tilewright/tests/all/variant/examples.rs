//! The examples against a plain f64 loop.

#[path = "../../../examples/distance_kernel.rs"]
#[allow(dead_code, unreachable_pub, reason = "as it stands, with its `main`")]
pub(crate) mod distance_kernel;
#[path = "../../../examples/flash_sigmoid.rs"]
#[allow(dead_code, unreachable_pub, reason = "as it stands, with its `main`")]
mod flash_sigmoid;

const DIM: usize = 64;

/// The examples' 3 queries of 2 heads after 5 cached tokens: `o[i, h] = Σ_j weight(s, h, j - p) · v[j] / total(weights)`.
fn loop_in_f64(weight: impl Fn(f64, usize, f64) -> f64, total: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let q: Vec<f64> = (0..3 * 2 * DIM).map(|i| f64::from((i as f32 * 0.37).sin())).collect();
    let kv: Vec<f64> = (0..8 * DIM).map(|i| f64::from((i as f32 * 0.11).cos())).collect();
    let mut o = vec![0.0; q.len()];
    for (row, o) in o.chunks_mut(DIM).enumerate() {
        let (position, head) = (5 + row / 2, row % 2);
        let mut weights = [0.0; 8];
        // causal, the default mask
        for (j, weight_of) in weights.iter_mut().enumerate().take(position + 1) {
            let product: f64 = (0..DIM).map(|d| q[row * DIM + d] * kv[j * DIM + d]).sum();
            *weight_of = weight(product / (DIM as f64).sqrt(), head, j as f64 - position as f64);
        }
        let total = total(&weights);
        for (d, o) in o.iter_mut().enumerate() {
            *o = (0..8).map(|j| weights[j] * kv[j * DIM + d]).sum::<f64>() / total;
        }
    }
    o
}

fn assert_near(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*got) - want).abs() < 2e-5, "o[{at}] = {got}, expected {want}");
    }
}

#[test]
fn a_distance_kernel_as_a_loop() {
    let ranges = [2.0, 50.0];
    let weight = |s: f64, head: usize, distance: f64| (s * (-distance.abs() / ranges[head]).exp()).exp();
    let want = loop_in_f64(weight, |weights| weights.iter().sum());
    assert_near(&distance_kernel::outputs().expect("it runs"), &want);
}

#[test]
fn flash_sigmoid_as_a_loop() {
    let weight = |s: f64, _: usize, _: f64| 1.0 / (1.0 + (-(s - 8f64.ln())).exp());
    let want = loop_in_f64(weight, |_| 1.0);
    assert_near(&flash_sigmoid::outputs().expect("it runs"), &want);
}
