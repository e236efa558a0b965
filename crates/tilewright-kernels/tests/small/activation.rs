//! Gated activations.

use crate::{
    real::{Real, assert_near, noise},
    simulate::{SEEDS, args, simulate},
};
use half::{bf16, f16};
use tilewright::{activation::Activation as Name, reference::activation::act_and_mul as definition};
use tilewright_kernels::activation::{Activation, Gated, act_and_mul};
use tilewright_ptx::sim::Memory;

const ALL: [(Activation, Name); 3] =
    [(Activation::Silu, Name::Silu), (Activation::Gelu, Name::Gelu), (Activation::GeluTanh, Name::GeluTanh)];

#[test]
fn tokens_of_all_widths() {
    for d in [8, 96, 1024, 2056] {
        for tokens in [1, 3] {
            ALL.iter().for_each(|&which| run::<bf16>(which, d, tokens, 0));
        }
        ALL.iter().for_each(|&which| run::<f16>(which, d, 2, 1));
        ALL.iter().for_each(|&which| run::<f32>(which, d, 2, 2));
    }
}

#[test]
fn whatever_the_timing() {
    (0..SEEDS).for_each(|seed| ALL.iter().for_each(|&which| run::<bf16>(which, 264, 3, seed)));
}

fn run<T: Real>((activation, name): (Activation, Name), d: usize, tokens: usize, seed: u64) {
    let config = Gated { activation, d: d as u32 };
    let kernel = act_and_mul::<T>("act_and_mul", config).expect("a valid kernel");
    let (x_stride, out_stride, mut memory) = (2 * d + 8, d + 16, Memory::new());
    // gates of -10 to 10: Φ(-10) is 8e-24, whose relative error counts
    let x: Vec<T> = noise::<T>(tokens * x_stride, seed + 1).iter().map(|x| T::of(x.wide() * 10.0)).collect();
    let (x_at, out_at) = (memory.alloc_from(&x), memory.alloc(tokens * out_stride * size_of::<T>()));
    let arguments = args(&[x_at, out_at], &[], &[x_stride as u64, out_stride as u64]);
    let what = format!("{config:?}, {tokens} tokens of {}", T::PTX);
    let grid = [tokens as u32, config.ctas_of_token::<T>(), 1];
    simulate(&what, &kernel, (grid, &arguments), seed, &mut memory);
    for token in 0..tokens {
        let at = out_at + (token * out_stride * size_of::<T>()) as u64;
        let found: Vec<T> = memory.read(at, d).expect("a token that was written");
        let (gates, factors) = x[token * x_stride..][..2 * d].split_at(d);
        for (i, found) in found.into_iter().enumerate() {
            let expected = definition(name, gates[i].wide(), factors[i].wide());
            let what = format!("{what}: token {token}, element {i}, gate {}", gates[i].wide());
            // the exponents are up to 100 and rounded to f32, twice
            assert_near(&what, found, expected, (2e-5, expected));
        }
    }
}

#[test]
fn ends_of_the_number_line() {
    let gates = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -1e30, 1e30, -100.0, 0.0, -0.0];
    for (activation, _) in ALL {
        let (config, mut memory) = (Gated { activation, d: 8 }, Memory::new());
        let x: Vec<f32> = gates.into_iter().chain([1.0; 8]).collect();
        let (x_at, out_at) = (memory.alloc_from(&x), memory.alloc(32));
        let kernel = act_and_mul::<f32>("act_and_mul", config).expect("a valid kernel");
        let arguments = args(&[x_at, out_at], &[], &[16, 8]);
        simulate("ends", &kernel, ([1, 1, 1], &arguments), 0, &mut memory);
        let found: Vec<f32> = memory.read(out_at, 8).expect("written");
        assert!(found[0].is_nan() && found[2].is_nan(), "{activation:?} of -inf and NaN: {found:?}");
        assert_eq!(found[1], f32::INFINITY, "{activation:?}");
        assert_eq!(found[3..], [0.0, 1e30, 0.0, 0.0, 0.0], "{activation:?}");
    }
}

#[test]
fn offsets_have_64_bits() {
    // allocations are 2^32 bytes apart in the simulator: token 1 of this stride is in the next one
    let (config, mut memory) = (Gated { activation: Activation::Silu, d: 8 }, Memory::new());
    let tokens = [noise::<f16>(16, 1), noise::<f16>(16, 2)];
    let [x_at, _] = [&tokens[0], &tokens[1]].map(|token| memory.alloc_from(token));
    let out = [memory.alloc(16), memory.alloc(16)];
    let kernel = act_and_mul::<f16>("act_and_mul", config).expect("a valid kernel");
    let arguments = args(&[x_at, out[0]], &[], &[1 << 31; 2]);
    simulate("far tokens", &kernel, ([2, 1, 1], &arguments), 0, &mut memory);
    for (token, at) in tokens.iter().zip(out) {
        for (i, found) in memory.read::<f16>(at, 8).expect("a token").into_iter().enumerate() {
            let expected = definition(Name::Silu, token[i].wide(), token[8 + i].wide());
            assert_near("far token", found, expected, (1e-5, expected));
        }
    }
}

#[test]
fn refuses_widths_that_are_no_vectors() {
    let config = Gated { activation: Activation::Gelu, d: 12 };
    let error = act_and_mul::<bf16>("gelu", config).expect_err("refused").to_string();
    assert_eq!(error, "kernel gelu: d = 12, expected a multiple of 8 in 8..=1073741824");
}
