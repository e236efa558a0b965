//! RMSNorm, alone and behind an addition.

use crate::{
    real::{Real, assert_near, noise, wide},
    simulate::{SEEDS, args, simulate},
};
use half::{bf16, f16};
use tilewright::reference::norm::rmsnorm as definition;
use tilewright_kernels::norm::{Norm, fused_add_rmsnorm, rmsnorm};
use tilewright_ptx::sim::{Arg, Memory};

const EPS: f32 = 1e-5;

/// A row of one vector, of a few lanes, of a warp, of one that is not full, and of warps.
const HIDDEN: [usize; 9] = [8, 24, 128, 256, 1024, 1032, 1280, 4096, 5120];

#[test]
fn rows_of_all_lengths_are_normalised() {
    for hidden in HIDDEN {
        for rows in [1, 5] {
            both::<bf16>(hidden, rows, 0);
        }
        both::<f16>(hidden, 3, 1);
        both::<f32>(hidden, 2, 2);
    }
}

#[test]
fn whatever_the_timing() {
    for seed in 0..SEEDS {
        both::<bf16>(136, 7, seed);
        both::<bf16>(1288, 2, seed);
    }
}

fn both<T: Real>(hidden: usize, rows: usize, seed: u64) {
    for weight_plus_one in [false, true] {
        let config = Norm { hidden: hidden as u32, weight_plus_one };
        alone::<T>(config, rows, seed);
        in_place::<T>(config, rows, seed);
        fused::<T>(config, rows, seed);
    }
}

fn normalised(config: Norm, x: &[f64], weight: &[f64]) -> Vec<f64> {
    definition(x, weight, if config.weight_plus_one { 1.0 } else { 0.0 }, f64::from(EPS))
}

/// x, weight and result in one launch; strides in elements.
fn arguments(addresses: [u64; 3], rows: usize, strides: [u64; 2]) -> Vec<Arg> {
    let mut arguments = args(&addresses, &[rows as u32], &strides);
    arguments.push(Arg::F32(EPS));
    arguments
}

fn alone<T: Real>(config: Norm, rows: usize, seed: u64) {
    let kernel = rmsnorm::<T>("rmsnorm", config).expect("a valid kernel");
    let (hidden, mut memory) = (config.hidden as usize, Memory::new());
    let (x_stride, out_stride) = (hidden + 8, hidden + 16);
    let (x, weight) = (noise::<T>(rows * x_stride, seed + 1), noise::<T>(hidden, seed + 2));
    let (x_at, weight_at) = (memory.alloc_from(&x), memory.alloc_from(&weight));
    let out_at = memory.alloc(rows * out_stride * size_of::<T>());
    let arguments = arguments([x_at, weight_at, out_at], rows, [x_stride as u64, out_stride as u64]);
    let what = format!("{config:?}, {rows} rows of {}", T::PTX);
    simulate(&what, &kernel, ([config.ctas::<T>(rows as u32), 1, 1], &arguments), seed, &mut memory);
    for row in 0..rows {
        let expected = normalised(config, &wide(&x[row * x_stride..][..hidden]), &wide(&weight));
        let at = out_at + (row * out_stride * size_of::<T>()) as u64;
        let found: Vec<T> = memory.read(at, hidden).expect("a row that was written");
        compare(&format!("{what}: row {row}"), &found, &expected);
    }
}

fn compare<T: Real>(what: &str, found: &[T], expected: &[f64]) {
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        assert_near(&format!("{what}, element {i}"), found, expected, (1e-6, expected));
    }
}

fn in_place<T: Real>(config: Norm, rows: usize, seed: u64) {
    let kernel = rmsnorm::<T>("rmsnorm", config).expect("a valid kernel");
    let (hidden, mut memory) = (config.hidden as usize, Memory::new());
    let (x, weight) = (noise::<T>(rows * hidden, seed + 3), noise::<T>(hidden, seed + 4));
    let (x_at, weight_at) = (memory.alloc_from(&x), memory.alloc_from(&weight));
    let arguments = arguments([x_at, weight_at, x_at], rows, [hidden as u64; 2]);
    let what = format!("{config:?}, {rows} rows of {} in place", T::PTX);
    simulate(&what, &kernel, ([config.ctas::<T>(rows as u32), 1, 1], &arguments), seed, &mut memory);
    let found: Vec<T> = memory.read(x_at, rows * hidden).expect("rows");
    let expected = x.chunks(hidden).flat_map(|row| normalised(config, &wide(row), &wide(&weight)));
    compare(&what, &found, &expected.collect::<Vec<_>>());
}

fn fused<T: Real>(config: Norm, rows: usize, seed: u64) {
    let kernel = fused_add_rmsnorm::<T>("fused_add_rmsnorm", config).expect("a valid kernel");
    let (hidden, mut memory) = (config.hidden as usize, Memory::new());
    let stride = hidden + 8;
    let (x, residual) = (noise::<T>(rows * hidden, seed + 5), noise::<T>(rows * stride, seed + 6));
    let weight = noise::<T>(hidden, seed + 7);
    let [x_at, residual_at, weight_at] = [&x, &residual, &weight].map(|values| memory.alloc_from(values));
    let arguments = arguments([x_at, residual_at, weight_at], rows, [hidden as u64, stride as u64]);
    let what = format!("{config:?}, {rows} rows of {} added", T::PTX);
    simulate(&what, &kernel, ([config.ctas::<T>(rows as u32), 1, 1], &arguments), seed, &mut memory);
    let found: Vec<T> = memory.read(x_at, rows * hidden).expect("rows");
    let kept: Vec<T> = memory.read(residual_at, rows * stride).expect("rows");
    for row in 0..rows {
        let (x, before) = (&x[row * hidden..][..hidden], &residual[row * stride..][..stride]);
        let sums: Vec<f64> = x.iter().zip(before).map(|(x, residual)| x.wide() + residual.wide()).collect();
        let (after, behind) = kept[row * stride..][..stride].split_at(hidden);
        compare(&format!("{what}: residual {row}"), after, &sums);
        assert_eq!(behind, &before[hidden..], "{what}: behind residual {row}");
        let expected = normalised(config, &sums, &wide(&weight));
        // a sum that nearly cancels is as exact as what was added
        for (i, (&found, &expected)) in found[row * hidden..].iter().zip(&expected).enumerate() {
            assert_near(
                &format!("{what}: row {row}, element {i}"),
                found,
                expected,
                (1e-6, expected.abs() + 0.1),
            );
        }
    }
}

#[test]
fn offsets_have_64_bits() {
    // allocations are 2^32 bytes apart in the simulator: row 1 of this stride is in the next one
    let (mut memory, config) = (Memory::new(), Norm { hidden: 64, weight_plus_one: false });
    let rows = [noise::<bf16>(64, 1), noise::<bf16>(64, 2)];
    let [x_at, _] = [&rows[0], &rows[1]].map(|row| memory.alloc_from(row));
    let out = [memory.alloc(128), memory.alloc(128)];
    let weight = noise::<bf16>(64, 3);
    let arguments = arguments([x_at, memory.alloc_from(&weight), out[0]], 2, [1 << 31; 2]);
    let kernel = rmsnorm::<bf16>("rmsnorm", config).expect("a valid kernel");
    simulate("far rows", &kernel, ([config.ctas::<bf16>(2), 1, 1], &arguments), 0, &mut memory);
    for (row, at) in rows.iter().zip(out) {
        let found: Vec<bf16> = memory.read(at, 64).expect("a row");
        compare("far row", &found, &normalised(config, &wide(row), &wide(&weight)));
    }
}

#[test]
fn a_row_with_nan_becomes_nan() {
    let (mut memory, config) = (Memory::new(), Norm { hidden: 256, weight_plus_one: false });
    let mut x = noise::<bf16>(512, 1);
    x[300] = bf16::NAN;
    let at = memory.alloc_from(&x);
    let arguments = arguments([at, memory.alloc_from(&noise::<bf16>(256, 2)), at], 2, [256; 2]);
    let kernel = rmsnorm::<bf16>("rmsnorm", config).expect("a valid kernel");
    simulate("NaN", &kernel, ([config.ctas::<bf16>(2), 1, 1], &arguments), 0, &mut memory);
    let found: Vec<bf16> = memory.read(at, 512).expect("rows");
    assert!(found[..256].iter().all(|x| !x.is_nan()), "the other row");
    assert!(found[256..].iter().all(|x| x.is_nan()), "the row");
}

#[test]
fn refuses_rows_that_are_no_vectors() {
    let config = |hidden| Norm { hidden, weight_plus_one: false };
    let alone = |hidden| rmsnorm::<bf16>("norm", config(hidden)).expect_err("refused").to_string();
    assert_eq!(alone(100), "kernel norm: hidden = 100, expected a multiple of 8 in 8..=32768");
    assert_eq!(alone(40_000), "kernel norm: hidden = 40000, expected a multiple of 8 in 8..=32768");
    let fused = fused_add_rmsnorm::<f32>("add", config(0)).expect_err("refused").to_string();
    assert_eq!(fused, "kernel add: hidden = 0, expected a multiple of 4 in 4..=16384");
}
