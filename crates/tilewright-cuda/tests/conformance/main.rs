//! The engine's own tests of backends, against the GPU: in the simulator at reduced sizes, and on the card where there is one.

mod staged;

use half::bf16;
use staged::Staged;
use tilewright::{View, ViewMut, norm};
use tilewright_cuda::{Gpu, Simulator};

/// The backend in a simulator of a GPU with few SMs, so that they have to share work.
fn simulated() -> Staged<Simulator> {
    Staged(Gpu::new(Simulator::new(80, 3)))
}

#[test]
fn a_norm_runs_through_the_backend() {
    let (rows, hidden) = (3, 128);
    let x: Vec<bf16> = (0..rows * hidden).map(|i| bf16::from_f32((i % 17) as f32 - 8.0)).collect();
    let weight = vec![bf16::ONE; hidden];
    let mut out = vec![bf16::NAN; x.len()];
    norm::rmsnorm(
        &simulated(),
        View::new(&x, &[rows, hidden]).expect("a view"),
        View::new(&weight, &[hidden]).expect("a view"),
        1e-6,
        ViewMut::new(&mut out, &[rows, hidden]).expect("a view"),
    )
    .expect("it runs");
    for (x, out) in x.chunks_exact(hidden).zip(out.chunks_exact(hidden)) {
        let mean = x.iter().map(|x| x.to_f64().powi(2)).sum::<f64>() / hidden as f64;
        for (x, out) in x.iter().zip(out) {
            let want = x.to_f64() / (mean + 1e-6).sqrt();
            assert!((out.to_f64() - want).abs() <= want.abs() / 256.0, "{out} instead of {want}");
        }
    }
}
