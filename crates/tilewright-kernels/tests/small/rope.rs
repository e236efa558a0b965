//! Rotary embedding.

use crate::{
    real::{Real, assert_near, noise, wide},
    simulate::{SEEDS, args, simulate},
};
use half::{bf16, f16};
use tilewright::{
    reference::rope::{frequency, rotate},
    rope::{CosSinCache, Rope as Embedding, RopeStyle},
};
use tilewright_kernels::rope::{Rope, Style, rope};
use tilewright_ptx::sim::Memory;

const THETA: f64 = 10_000.0;
const POSITIONS: u32 = 50;

fn config(heads: (u32, u32), (head_dim, rotary_dim): (u32, u32), style: Style, in_place: bool) -> Rope {
    Rope { heads, head_dim, rotary_dim, style, in_place }
}

#[test]
fn heads_of_all_sizes() {
    for style in [Style::Halves, Style::Interleaved] {
        for in_place in [false, true] {
            for dims in [(16, 16), (64, 64), (80, 32), (128, 128), (128, 64), (192, 96)] {
                run::<bf16>(config((5, 2), dims, style, in_place), 3, 0);
            }
            // one tensor alone, heads that are no multiple of a thread's, and more threads a token than a CTA has
            run::<f16>(config((3, 0), (32, 32), style, in_place), 5, 1);
            run::<f16>(config((0, 1), (32, 16), style, in_place), 4, 1);
            run::<f32>(config((9, 3), (24, 8), style, in_place), 7, 2);
            run::<bf16>(config((70, 70), (128, 112), style, in_place), 2, 3);
        }
    }
}

#[test]
fn whatever_the_timing() {
    for seed in 0..SEEDS {
        run::<bf16>(config((6, 2), (64, 32), Style::Halves, seed % 2 == 0), 5, seed);
        run::<f16>(config((6, 2), (64, 32), Style::Interleaved, seed % 2 == 0), 5, seed);
    }
}

fn style(config: Rope) -> RopeStyle {
    match config.style {
        Style::Halves => RopeStyle::Neox,
        Style::Interleaved => RopeStyle::Interleaved,
    }
}

/// The table that the engine makes.
fn table(config: Rope) -> Vec<f32> {
    let embedding = Embedding::new(config.rotary_dim as usize, THETA).expect("an embedding");
    let cache = CosSinCache::new(&embedding.with_style(style(config)), POSITIONS);
    cache.view().as_slice::<f32>().expect("f32").to_vec()
}

fn rotated(config: Rope, head: &[f64], position: i32) -> Vec<f64> {
    let pairs = 0..config.rotary_dim as usize / 2;
    let angle = |pair| f64::from(position) * frequency(pair, config.rotary_dim as usize, THETA);
    rotate(head, &pairs.map(angle).collect::<Vec<_>>(), style(config))
}

/// q and k in one tensor, each token's heads of q, then of k, then 8 elements of others; results are dense.
fn run<T: Real>(config: Rope, tokens: usize, seed: u64) {
    let kernel = rope::<T>("rope", config).expect("a valid kernel");
    let (dim, heads) = (config.head_dim as usize, config.heads.0 as usize + config.heads.1 as usize);
    let (stride, mut memory) = (heads * dim + 8, Memory::new());
    let x = noise::<T>(tokens * stride, seed + 1);
    let positions: Vec<i32> = (0..tokens as i32).map(|token| (token * 19 + 3) % POSITIONS as i32).collect();
    let element = size_of::<T>() as u64;
    let k_offset = u64::from(config.heads.0) * dim as u64;
    let q_at = memory.alloc_from(&x);
    let dense = [config.heads.0, config.heads.1].map(|heads| u64::from(heads) * dim as u64);
    let out = dense.map(|row| memory.alloc((row as usize * tokens).max(1) * element as usize));
    let rest = [memory.alloc_from(&table(config)), memory.alloc_from(&positions)];
    let (dim_wide, from) = (dim as u64, [q_at, q_at + k_offset * element]);
    let from_strides = [stride as u64, dim_wide, stride as u64, dim_wide];
    let arguments = match config.in_place {
        true => args(&[from, rest].concat(), &[tokens as u32], &from_strides),
        false => {
            let strides = [from_strides, [dense[0], dim_wide, dense[1], dim_wide]].concat();
            args(&[from, out, rest].concat(), &[tokens as u32], &strides)
        }
    };
    let what = format!("{config:?}, {tokens} tokens of {}", T::PTX);
    simulate(&what, &kernel, (config.grid::<T>(tokens as u32), &arguments), seed, &mut memory);
    for (token, position) in positions.iter().enumerate() {
        for head in 0..heads {
            let before = &x[token * stride + head * dim..][..dim];
            let is_k = usize::from(head >= config.heads.0 as usize);
            let of_its = (head - is_k * config.heads.0 as usize) * dim;
            let at = match config.in_place {
                true => q_at + (token * stride + head * dim) as u64 * element,
                false => out[is_k] + (token as u64 * dense[is_k] + of_its as u64) * element,
            };
            let found: Vec<T> = memory.read(at, dim).expect("a head that was written");
            let what = format!("{what}: token {token}, head {head}");
            for (i, expected) in rotated(config, &wide(before), *position).into_iter().enumerate() {
                assert_near(&format!("{what}, element {i}"), found[i], expected, (3e-7, 2.0));
            }
            let kept = config.rotary_dim as usize..;
            assert_eq!(found[kept.clone()], before[kept], "{what}: behind rotary_dim");
        }
        if config.in_place {
            let behind: Vec<T> =
                memory.read(q_at + ((token + 1) * stride - 8) as u64 * element, 8).expect("8");
            assert_eq!(behind, x[(token + 1) * stride - 8..][..8], "{what}: behind token {token}");
        }
    }
}

#[test]
fn offsets_have_64_bits() {
    // allocations are 2^32 bytes apart in the simulator: token 1 of this stride is in the next one
    let (config, mut memory) = (config((1, 0), (16, 16), Style::Halves, true), Memory::new());
    let tokens = [noise::<bf16>(16, 1), noise::<bf16>(16, 2)];
    let at = [&tokens[0], &tokens[1]].map(|token| memory.alloc_from(token));
    let addresses = [at[0], at[0], memory.alloc_from(&table(config)), memory.alloc_from(&[7, 9])];
    let arguments = args(&addresses, &[2], &[1 << 31, 16, 0, 0]);
    let kernel = rope::<bf16>("rope", config).expect("a valid kernel");
    simulate("far tokens", &kernel, (config.grid::<bf16>(2), &arguments), 0, &mut memory);
    for (token, (at, position)) in tokens.iter().zip(at.into_iter().zip([7, 9])) {
        let found: Vec<bf16> = memory.read(at, 16).expect("a token");
        for (found, expected) in found.into_iter().zip(rotated(config, &wide(token), position)) {
            assert_near("far token", found, expected, (3e-7, 2.0));
        }
    }
}

#[test]
fn refuses_dimensions_that_are_no_pairs_of_vectors() {
    let error = |heads, dims| {
        let config = config(heads, dims, Style::Halves, true);
        rope::<bf16>("rope", config).expect_err("refused").to_string()
    };
    assert_eq!(error((1, 1), (72, 64)), "kernel rope: head_dim = 72, expected a multiple of 16 in 16..=4096");
    assert_eq!(error((1, 1), (64, 80)), "kernel rope: rotary_dim = 80, expected a multiple of 16 in 16..=64");
    assert_eq!(error((1, 1), (64, 24)), "kernel rope: rotary_dim = 24, expected a multiple of 16 in 16..=64");
    assert_eq!(error((0, 0), (64, 64)), "kernel rope: heads = (0, 0), expected at least one head");
    assert_eq!(error((1, 5000), (64, 64)), "kernel rope: heads.1 = 5000, expected 0..=4096");
}
