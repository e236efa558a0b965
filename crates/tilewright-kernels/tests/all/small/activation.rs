//! Gated activations.

use super::simulate::{SEEDS, simulate};
use crate::real::{Real, assert_near, noise};
use half::{bf16, f16};
use tilewright::{Dtype, reference::activation::act_and_mul as definition};
use tilewright_kernels::{
    activation::{Activation, ActivationParams, act_and_mul},
    tile::Strided,
};
use tilewright_ptx::sim::Memory;

const ALL: [Activation; 3] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh];

#[test]
fn tokens_of_all_widths() {
    for d in [8, 96, 1024, 2056, 133] {
        for tokens in [1, 3] {
            ALL.iter().for_each(|&which| run::<bf16, bf16>(which, d, tokens, 0));
        }
        ALL.iter().for_each(|&which| run::<f16, f16>(which, d, 2, 1));
        ALL.iter().for_each(|&which| run::<f32, f32>(which, d, 2, 2));
        ALL.iter().for_each(|&which| run::<f32, bf16>(which, d, 2, 3));
    }
}

#[test]
fn many_seeds() {
    (0..SEEDS).for_each(|seed| ALL.iter().for_each(|&which| run::<bf16, bf16>(which, 264, 3, seed)));
}

/// Parameters for dense tensors with gaps between tokens.
fn call<T: Real>(
    activation: Activation,
    [x, out]: [u64; 2],
    (tokens, d): (usize, usize),
    strides: [u64; 2],
) -> ActivationParams {
    ActivationParams {
        activation,
        dtypes: (T::DTYPE, T::DTYPE),
        shape: [tokens as u32, d as u32],
        x: Strided { address: x, strides: [strides[0], 0] },
        out: Strided { address: out, strides: [strides[1], 0] },
    }
}

fn launch(what: &str, call: ActivationParams, seed: u64, memory: &mut Memory) {
    let kernel = act_and_mul("act_and_mul", call.config()).expect("a valid kernel");
    let (grid, args) = call.launch();
    simulate(&format!("{what} {call:?}"), &kernel, (grid, &args), seed, memory);
}

fn run<T: Real, Out: Real>(activation: Activation, d: usize, tokens: usize, seed: u64) {
    let (x_stride, out_stride, mut memory) = (2 * d + 8, d + 16, Memory::new());
    // no element follows the last token: a write there is a fault
    let out_len = (tokens - 1) * out_stride + d;
    // gates from -10 to 10: Φ(-10) is 8e-24, which tests the relative error
    let x: Vec<T> = noise::<T>(tokens * x_stride, seed + 1).iter().map(|x| T::of(x.wide() * 10.0)).collect();
    let (x_at, out_at) = (memory.alloc_from(&x), memory.alloc(out_len * size_of::<Out>()));
    let what = format!("{activation:?}, {tokens} tokens of {d} {} to {}", T::PTX, Out::PTX);
    let strides = [x_stride as u64, out_stride as u64];
    let call = call::<T>(activation, [x_at, out_at], (tokens, d), strides);
    launch(&what, ActivationParams { dtypes: (T::DTYPE, Out::DTYPE), ..call }, seed, &mut memory);
    for token in 0..tokens {
        let at = out_at + (token * out_stride * size_of::<Out>()) as u64;
        let found: Vec<Out> = memory.read(at, d).expect("a token that was written");
        let (gates, factors) = x[token * x_stride..][..2 * d].split_at(d);
        for (i, found) in found.into_iter().enumerate() {
            let expected = definition(activation, gates[i].wide(), factors[i].wide());
            let what = format!("{what}: token {token}, element {i}, gate {}", gates[i].wide());
            // exponents are up to 100; except in exact formulas they are rounded to f32, twice
            let exact = Out::DTYPE == Dtype::F32 && activation != Activation::GeluTanh;
            let error = if exact { 1e-6 } else { 2e-5 };
            assert_near(&what, found, expected, (error, expected));
        }
    }
}

#[test]
fn infinite_nan_and_huge_gates() {
    let gates = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -1e30, 1e30, -100.0, 0.0, -0.0];
    for activation in ALL {
        let mut memory = Memory::new();
        let x: Vec<f32> = gates.into_iter().chain([1.0; 8]).collect();
        let at = [memory.alloc_from(&x), memory.alloc(32)];
        launch("ends", call::<f32>(activation, at, (1, 8), [16, 8]), 0, &mut memory);
        let found: Vec<f32> = memory.read(at[1], 8).expect("written");
        assert!(found[0].is_nan() && found[2].is_nan(), "{activation:?} of -inf and NaN: {found:?}");
        assert_eq!(found[1], f32::INFINITY, "{activation:?}");
        assert_eq!(found[3..], [0.0, 1e30, 0.0, 0.0, 0.0], "{activation:?}");
    }
}

#[test]
fn offsets_have_64_bits() {
    // the simulator places allocations 2^32 bytes apart; with this stride token 2 begins at element 2^32
    let mut memory = Memory::new();
    let tokens = [1, 2, 3].map(|seed| noise::<f16>(16, seed));
    let [x_at, ..] = tokens.each_ref().map(|token| memory.alloc_from(token));
    let out = [0; 3].map(|_| memory.alloc(16));
    let far = call::<f16>(Activation::Silu, [x_at, out[0]], (3, 8), [1 << 31; 2]);
    launch("far tokens", far, 0, &mut memory);
    for (token, at) in tokens.iter().zip(out) {
        for (i, found) in memory.read::<f16>(at, 8).expect("a token").into_iter().enumerate() {
            let expected = definition(Activation::Silu, token[i].wide(), token[8 + i].wide());
            assert_near("far token", found, expected, (1e-5, expected));
        }
    }
}
