//! Elementwise operators.

use super::simulate::{SEEDS, simulate};
use crate::real::{Real, assert_near, noise};
use half::{bf16, f16};
use tilewright::reference::elementwise::map as definition;
use tilewright_kernels::{
    elementwise::{AddParams, ElementFunction, MapParams, add, map},
    tile::Strided,
};
use tilewright_ptx::sim::Memory;

const FUNCTIONS: [ElementFunction; 2] =
    [ElementFunction::Scale { factor: 0.22 }, ElementFunction::SoftCap { cap: 1.2 }];

#[test]
fn rows_of_all_widths() {
    for width in [8, 96, 1024, 2056, 133] {
        for function in FUNCTIONS {
            mapped::<bf16>(function, [width, 3], 0);
            mapped::<f32>(function, [width, 2], 1);
            mapped::<f16>(function, [width, 1], 4);
        }
        added::<f32, bf16>([width, 3], 2);
        added::<f16, f32>([width, 2], 3);
        added::<bf16, f16>([width, 1], 5);
    }
}

#[test]
fn many_seeds() {
    for seed in 0..SEEDS {
        FUNCTIONS.iter().for_each(|&function| mapped::<f16>(function, [264, 2], seed));
        added::<bf16, f16>([264, 2], seed);
    }
}

fn mapped<T: Real>(function: ElementFunction, [width, rows]: [usize; 2], seed: u64) {
    let (stride, mut memory) = (width + 8, Memory::new());
    let x: Vec<T> = noise::<T>(rows * stride, seed + 1).iter().map(|x| T::of(x.wide() * 10.0)).collect();
    let at = memory.alloc_from(&x);
    let call = MapParams {
        function,
        dtype: T::DTYPE,
        shape: [rows as u32, width as u32],
        x: Strided { address: at, strides: [stride as u64, 0] },
    };
    let kernel = map("map", call.config()).expect("a valid kernel");
    let (grid, args) = call.launch();
    let what = format!("{function:?} of {rows} rows of {width} {}", T::PTX);
    simulate(&what, &kernel, (grid, &args), seed, &mut memory);
    let found: Vec<T> = memory.read(at, rows * stride).expect("rows");
    for (i, (found, before)) in found.into_iter().zip(x).enumerate() {
        // gaps between rows are kept
        let expected = if i % stride < width { definition(function, before.wide()) } else { before.wide() };
        assert_near(&format!("{what}: element {i}"), found, expected, (1e-6, expected));
    }
}

fn added<T: Real, Out: Real>([width, rows]: [usize; 2], seed: u64) {
    let (stride, mut memory) = (width + 4, Memory::new());
    let x = noise::<T>(rows * stride, seed + 1);
    let residual = noise::<f32>(rows * stride, seed + 2);
    let (x_at, residual_at) = (memory.alloc_from(&x), memory.alloc_from(&residual));
    let out_at = memory.alloc_from(&noise::<Out>(rows * stride, seed + 3));
    let tensor = |address| Strided { address, strides: [stride as u64, 0] };
    let call = AddParams {
        dtypes: (T::DTYPE, Out::DTYPE),
        shape: [rows as u32, width as u32],
        x: tensor(x_at),
        residual: tensor(residual_at),
        out: tensor(out_at),
    };
    let kernel = add("add", call.config()).expect("a valid kernel");
    let (grid, args) = call.launch();
    let what = format!("{rows} rows of {width} {} to {}", T::PTX, Out::PTX);
    simulate(&what, &kernel, (grid, &args), seed, &mut memory);
    let sums: Vec<f32> = memory.read(residual_at, rows * stride).expect("sums");
    let rounded: Vec<Out> = memory.read(out_at, rows * stride).expect("rounded sums");
    for i in 0..rows * stride {
        if i % stride >= width {
            assert_eq!(sums[i], residual[i], "{what}: gap {i}");
            continue;
        }
        let expected = x[i].wide() + f64::from(residual[i]);
        assert_near(&format!("{what}: sum {i}"), sums[i], expected, (1e-6, expected));
        assert_near(&format!("{what}: element {i}"), rounded[i], expected, (1e-6, expected));
    }
}
