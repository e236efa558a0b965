//! RMSNorm, alone and after an addition, and layer norm.

use super::simulate::{SEEDS, simulate};
use crate::real::{Real, assert_near, noise, wide};
use half::{bf16, f16};
use tilewright::{
    Dtype,
    reference::{
        norm::{layer_norm, rmsnorm as definition},
        quant::{decode, quantize},
    },
};
use tilewright_kernels::{
    norm::{NormParams, norm},
    tile::Strided,
};
use tilewright_ptx::sim::Memory;

const EPS: f32 = 1e-5;

/// Rows of one chunk, a few lanes, a full warp, a partial warp, several warps, partial chunks, and one that is read
/// twice.
const HIDDEN: [usize; 12] = [8, 24, 128, 256, 1024, 1032, 1280, 4096, 5120, 7, 1001, 33_000];

#[test]
fn rows_of_all_lengths_are_normalised() {
    for hidden in HIDDEN {
        for rows in [1, 5] {
            check_all_forms::<bf16>(hidden, rows, 0);
        }
        check_all_forms::<f16>(hidden, 3, 1);
        check_all_forms::<f32>(hidden, 2, 2);
    }
}

#[test]
fn many_seeds() {
    for seed in 0..SEEDS {
        check_all_forms::<bf16>(136, 7, seed);
        check_all_forms::<bf16>(1288, 2, seed);
    }
}

fn check_all_forms<T: Real>(hidden: usize, rows: usize, seed: u64) {
    for offset in [0.0, 1.0] {
        check_norm::<T, T>((hidden, offset), rows, seed);
        check_norm::<f32, T>((hidden, offset), rows, seed);
        check_in_place::<T>((hidden, offset), rows, seed);
        check_fused_add::<T>((hidden, offset), rows, seed);
        check_fused_add_out_of_place::<T>((hidden, offset), rows, seed);
        check_layer_norm::<T>((hidden, offset), rows, seed);
    }
}

/// Rows around 3, so that the mean counts, to e4m3 too. Weights are f32.
fn check_layer_norm<T: Real>((hidden, offset): (usize, f32), rows: usize, seed: u64) {
    let mut memory = Memory::new();
    let x: Vec<T> = noise::<f32>(rows * hidden, seed + 8).iter().map(|x| T::of(x.wide() + 3.0)).collect();
    let [weight, bias] = [9, 10].map(|salt| noise::<f32>(hidden, seed + salt));
    let scale = 0.25_f32;
    let (x_at, scale_at) = (memory.alloc_from(&x), memory.alloc_from(&[scale]));
    let [weight_at, bias_at] = [&weight, &bias].map(|values| memory.alloc_from(values));
    let out_at = memory.alloc(rows * hidden * size_of::<T>());
    let plain = NormParams {
        dtypes: (T::DTYPE, Dtype::F32),
        bias: Some(((bias_at, 1), Dtype::F32)),
        offset,
        ..call::<T>([x_at, out_at, weight_at], (rows, hidden), [hidden as u64; 2])
    };
    run("layer norm", plain, seed, &mut memory);
    let expected = x.chunks(hidden).flat_map(|row| {
        layer_norm(&wide(row), &wide(&weight), f64::from(offset), &wide(&bias), f64::from(EPS))
    });
    let expected: Vec<f64> = expected.collect();
    let found: Vec<T> = memory.read(out_at, rows * hidden).expect("rows");
    // deviations have the absolute error of the mean, times up to 1 / sqrt(EPS) in a row of one element
    for (i, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
        assert_near(&format!("{hidden}: layer norm {i}"), found, expected, (1e-6, expected.abs() + 20.0));
    }

    run(
        "quantized",
        NormParams { out: (plain.out.0, Dtype::E4m3), scale: Some(scale_at), ..plain },
        seed,
        &mut memory,
    );
    let mut found = vec![0_u8; rows * hidden];
    memory.copy_to(out_at, &mut found).expect("rows");
    for (i, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
        let error = 1e-6 * (expected.abs() + 20.0);
        let [low, high] =
            [expected - error, expected + error].map(|y| quantize(Dtype::E4m3, y / f64::from(scale)));
        let found = decode(Dtype::E4m3, found);
        assert!((low..=high).contains(&found), "{hidden}: {i} is {found}, expected {low} to {high}");
    }
}

fn normalised(offset: f32, x: &[f64], weight: &[f64]) -> Vec<f64> {
    definition(x, weight, f64::from(offset), f64::from(EPS))
}

/// Parameters for tensors of one head and one dtype: addresses of x, the result and the weight.
fn call<T: Real>(
    [x, out, weight]: [u64; 3],
    (rows, hidden): (usize, usize),
    strides: [u64; 2],
) -> NormParams {
    NormParams {
        dtypes: (T::DTYPE, T::DTYPE),
        shape: [rows as u32, 1, hidden as u32],
        x: at(x, strides[0]),
        residual: None,
        out: (at(out, strides[1]), T::DTYPE),
        weight: (weight, 1),
        bias: None,
        scale: None,
        eps: EPS,
        offset: 0.0,
    }
}

/// Rows of one head with this stride.
fn at(address: u64, stride: u64) -> Strided {
    Strided { address, strides: [stride, 0] }
}

fn run(what: &str, call: NormParams, seed: u64, memory: &mut Memory) {
    let kernel = norm("norm", call.config()).expect("a valid kernel");
    let (grid, args) = call.launch();
    simulate(&format!("{what} {call:?}"), &kernel, (grid, &args), seed, memory);
}

/// x and the weight of one dtype, the result of another.
fn check_norm<T: Real, Out: Real>((hidden, offset): (usize, f32), rows: usize, seed: u64) {
    let mut memory = Memory::new();
    let (x_stride, out_stride) = (hidden + 8, hidden + 16);
    let (x, weight) = (noise::<T>(rows * x_stride, seed + 1), noise::<T>(hidden, seed + 2));
    let (x_at, weight_at) = (memory.alloc_from(&x), memory.alloc_from(&weight));
    let out_at = memory.alloc(rows * out_stride * size_of::<Out>());
    let call = call::<T>([x_at, out_at, weight_at], (rows, hidden), [x_stride as u64, out_stride as u64]);
    let out = (call.out.0, Out::DTYPE);
    run("alone", NormParams { offset, out, ..call }, seed, &mut memory);
    for row in 0..rows {
        let expected = normalised(offset, &wide(&x[row * x_stride..][..hidden]), &wide(&weight));
        let at = out_at + (row * out_stride * size_of::<Out>()) as u64;
        let found: Vec<Out> = memory.read(at, hidden).expect("a row that was written");
        compare(&format!("{hidden}: row {row}"), &found, &expected);
    }
}

fn compare<T: Real>(what: &str, found: &[T], expected: &[f64]) {
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        assert_near(&format!("{what}, element {i}"), found, expected, (1e-6, expected));
    }
}

fn check_in_place<T: Real>((hidden, offset): (usize, f32), rows: usize, seed: u64) {
    let mut memory = Memory::new();
    let (x, weight) = (noise::<T>(rows * hidden, seed + 3), noise::<T>(hidden, seed + 4));
    let (x_at, weight_at) = (memory.alloc_from(&x), memory.alloc_from(&weight));
    let call = call::<T>([x_at, x_at, weight_at], (rows, hidden), [hidden as u64; 2]);
    run("in place", NormParams { offset, ..call }, seed, &mut memory);
    let found: Vec<T> = memory.read(x_at, rows * hidden).expect("rows");
    let expected = x.chunks(hidden).flat_map(|row| normalised(offset, &wide(row), &wide(&weight)));
    compare("in place", &found, &expected.collect::<Vec<_>>());
}

fn check_fused_add<T: Real>((hidden, offset): (usize, f32), rows: usize, seed: u64) {
    let (mut memory, stride) = (Memory::new(), hidden + 8);
    let (x, residual) = (noise::<T>(rows * hidden, seed + 5), noise::<T>(rows * stride, seed + 6));
    let weight = noise::<T>(hidden, seed + 7);
    let [x_at, residual_at, weight_at] = [&x, &residual, &weight].map(|values| memory.alloc_from(values));
    let call = call::<T>([x_at, x_at, weight_at], (rows, hidden), [hidden as u64; 2]);
    let residual_rows = Some((at(residual_at, stride as u64), T::DTYPE));
    run("added", NormParams { offset, residual: residual_rows, ..call }, seed, &mut memory);
    let found: Vec<T> = memory.read(x_at, rows * hidden).expect("rows");
    let kept: Vec<T> = memory.read(residual_at, rows * stride).expect("rows");
    check_sum(((hidden, offset), &weight), (&x, &residual), (&found, &kept));
}

/// x and residual in f32, the result elsewhere, rounded.
fn check_fused_add_out_of_place<Out: Real>((hidden, offset): (usize, f32), rows: usize, seed: u64) {
    let (mut memory, stride) = (Memory::new(), hidden + 8);
    let (x, residual) = (noise::<f32>(rows * hidden, seed + 5), noise::<f32>(rows * stride, seed + 6));
    let weight = noise::<Out>(hidden, seed + 7);
    let [x_at, residual_at] = [&x, &residual].map(|values| memory.alloc_from(values));
    let (weight_at, out_at) = (memory.alloc_from(&weight), memory.alloc(rows * hidden * size_of::<Out>()));
    let call = call::<f32>([x_at, out_at, weight_at], (rows, hidden), [hidden as u64; 2]);
    let call = NormParams {
        dtypes: (Dtype::F32, Out::DTYPE),
        residual: Some((at(residual_at, stride as u64), Dtype::F32)),
        out: (call.out.0, Out::DTYPE),
        offset,
        ..call
    };
    run("added apart", call, seed, &mut memory);
    let found: Vec<Out> = memory.read(out_at, rows * hidden).expect("rows");
    let kept: Vec<f32> = memory.read(residual_at, rows * stride).expect("rows");
    assert_eq!(memory.read::<f32>(x_at, rows * hidden).expect("rows"), x, "x is only read");
    check_sum(((hidden, offset), &weight), (&x, &residual), (&found, &kept));
}

/// Compares results and residuals, which have 8 padding elements per row, with the sums of the inputs.
fn check_sum<T: Real, Out: Real>(
    ((hidden, offset), weight): ((usize, f32), &[Out]),
    (x, residual): (&[T], &[T]),
    (found, kept): (&[Out], &[T]),
) {
    let stride = hidden + 8;
    for row in 0..found.len() / hidden {
        let (x, before) = (&x[row * hidden..][..hidden], &residual[row * stride..][..stride]);
        let sums: Vec<f64> = x.iter().zip(before).map(|(x, residual)| x.wide() + residual.wide()).collect();
        let (after, behind) = kept[row * stride..][..stride].split_at(hidden);
        compare(&format!("{hidden}: residual {row}"), after, &sums);
        assert_eq!(behind, &before[hidden..], "behind residual {row}");
        // a sum that nearly cancels has the absolute error of its terms
        let expected = normalised(offset, &sums, &wide(weight));
        for (&found, &expected) in found[row * hidden..].iter().zip(&expected) {
            assert_near(&format!("{hidden}: row {row}"), found, expected, (1e-6, expected.abs() + 0.1));
        }
    }
}

#[test]
fn offsets_have_64_bits() {
    // allocations are 2^32 bytes apart in the simulator, and rows of this stride, too: row 2 begins at element 2^32
    let mut memory = Memory::new();
    let rows = [1, 2, 3].map(|seed| noise::<bf16>(64, seed));
    let [x_at, ..] = rows.each_ref().map(|row| memory.alloc_from(row));
    let out = [0; 3].map(|_| memory.alloc(128));
    let weight = noise::<bf16>(64, 4);
    let at = [x_at, out[0], memory.alloc_from(&weight)];
    run("far rows", call::<bf16>(at, (3, 64), [1 << 31; 2]), 0, &mut memory);
    for (row, at) in rows.iter().zip(out) {
        let found: Vec<bf16> = memory.read(at, 64).expect("a row");
        compare("far row", &found, &normalised(0.0, &wide(row), &wide(&weight)));
    }
}

#[test]
fn a_row_with_nan_becomes_nan() {
    let mut memory = Memory::new();
    let mut x = noise::<bf16>(512, 1);
    x[300] = bf16::NAN;
    let at = memory.alloc_from(&x);
    let weight = memory.alloc_from(&noise::<bf16>(256, 2));
    run("NaN", call::<bf16>([at, at, weight], (2, 256), [256; 2]), 0, &mut memory);
    let found: Vec<bf16> = memory.read(at, 512).expect("rows");
    assert!(found[..256].iter().all(|x| !x.is_nan()), "the other row");
    assert!(found[256..].iter().all(|x| x.is_nan()), "the row");
}

#[test]
fn the_host_vectorizes_aligned_loads() {
    let of = |x, (rows, hidden), strides| call::<bf16>([x, 512, 768], (rows, hidden), strides).config();
    assert_eq!(of(256, (2, 4096), [4096; 2]).width, 8);
    assert_eq!(of(258, (2, 4096), [4096; 2]).width, 1, "an address");
    assert_eq!(of(256, (2, 4096), [4100, 4096]).width, 1, "a stride");
    assert_eq!(of(256, (2, 4095), [4096; 2]).width, 1, "a length");
    let call = call::<bf16>([256, 512, 768], (2, 4096), [4096; 2]);
    assert_eq!(NormParams { dtypes: (Dtype::Bf16, Dtype::F32), ..call }.config().width, 4, "beside f32");
    assert_eq!(NormParams { weight: (768, 2), ..call }.config().width, 1, "a weight with gaps");
    assert_eq!(of(256, (1, 1 << 16), [1 << 16; 2]).rows, None, "a row that registers do not hold");
}
