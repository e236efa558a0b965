//! Softmax over logits.

use crate::{
    real::{assert_near, noise, wide},
    simulate::{SEEDS, args, simulate},
};
use tilewright::reference::sampling::softmax as definition;
use tilewright_kernels::softmax::{Softmax, softmax};
use tilewright_ptx::sim::Memory;

/// Rows that are one number, that have no vector, that begin at every distance from 16 bytes, and that are several batches long.
const VOCABS: [usize; 11] = [1, 2, 3, 5, 7, 511, 2048, 2051, 8192, 8198, 20_001];

#[test]
fn rows_of_all_lengths() {
    for vocab in VOCABS {
        for in_place in [false, true] {
            let mut logits: Vec<f32> =
                noise::<f32>(5 * vocab, vocab as u64).iter().map(|x| x * 12.0).collect();
            logits.iter_mut().skip(1).step_by(7).for_each(|x| *x = f32::NEG_INFINITY);
            logits.chunks_mut(vocab).for_each(|row| row[vocab / 2] = 3.0);
            run(vocab, (&logits, &[1.0, 0.7, 0.0, 1e-30, 100.0]), in_place, 0);
        }
    }
}

#[test]
fn whatever_the_timing() {
    for seed in 0..SEEDS {
        let logits: Vec<f32> = noise::<f32>(3 * 2051, seed).iter().map(|x| x * 5.0).collect();
        run(2051, (&logits, &[1.0, 0.0, 0.3]), false, seed);
    }
}

#[test]
fn the_first_of_the_greatest_takes_all_at_temperature_0() {
    for vocab in [6, 9001] {
        let mut logits = vec![-1.0; vocab];
        [3, 4, vocab - 1].into_iter().for_each(|i| logits[i] = 2.0);
        run(vocab, (&logits, &[0.0]), false, 0);
    }
}

#[test]
fn rows_without_a_distribution_become_nan() {
    for (at, value) in [(0, f32::NAN), (4999, f32::NAN), (2500, f32::INFINITY)] {
        for temperature in [0.0, 1.0] {
            let mut logits = noise::<f32>(2 * 5000, 1);
            logits[at] = value;
            let found = result(5000, (&logits, &[temperature; 2]), false, 0);
            assert!(found[..5000].iter().all(|p| p.is_nan()), "{value} at {at}, temperature {temperature}");
            assert!(found[5000..].iter().all(|p| p.is_finite()), "the row behind {value} at {at}");
        }
    }
    for temperature in [0.0, 1.0] {
        let found = result(77, (&[f32::NEG_INFINITY; 77], &[temperature]), false, 0);
        assert!(found.iter().all(|p| p.is_nan()), "-inf alone, temperature {temperature}");
    }
}

fn result(vocab: usize, (logits, temperature): (&[f32], &[f32]), in_place: bool, seed: u64) -> Vec<f32> {
    let kernel = softmax("softmax", Softmax { vocab: vocab as u32 }).expect("a valid kernel");
    let mut memory = Memory::new();
    let (from, temperatures) = (memory.alloc_from(logits), memory.alloc_from(temperature));
    let to = if in_place { from } else { memory.alloc(logits.len() * 4) };
    let what = format!("{} rows of {vocab}", temperature.len());
    let grid = [temperature.len() as u32, 1, 1];
    simulate(&what, &kernel, (grid, &args(&[from, temperatures, to], &[], &[])), seed, &mut memory);
    memory.read(to, logits.len()).expect("probabilities")
}

fn run(vocab: usize, (logits, temperature): (&[f32], &[f32]), in_place: bool, seed: u64) {
    let found = result(vocab, (logits, temperature), in_place, seed);
    for (row, &temperature) in temperature.iter().enumerate() {
        let expected = definition(&wide(&logits[row * vocab..][..vocab]), f64::from(temperature));
        for (i, expected) in expected.into_iter().enumerate() {
            let what = format!("{vocab}: row {row}, temperature {temperature}, element {i}");
            // exponents of up to 100 are rounded to f32
            assert_near(&what, found[row * vocab + i], expected, (2e-5, expected));
        }
    }
}

#[test]
fn refuses_rows_without_numbers() {
    let error = |vocab| softmax("softmax", Softmax { vocab }).expect_err("refused").to_string();
    assert_eq!(error(0), "kernel softmax: vocab = 0, expected 1..=1073741824");
    assert_eq!(error(u32::MAX), "kernel softmax: vocab = 4294967295, expected 1..=1073741824");
}
