//! Rotary embedding.

use super::simulate::{SEEDS, simulate};
use crate::real::{Real, assert_near, noise, wide};
use half::{bf16, f16};
use tilewright::{
    Dtype,
    reference::{
        quant::{decode, quantize},
        rope::{frequency, rotate},
    },
    rope::{CosSinCache, Rope as Embedding, RopeStyle},
};
use tilewright_kernels::{
    rope::{Angles, RopeParams, rope, turns},
    tile::Strided,
};
use tilewright_ptx::sim::Memory;

const THETA: f64 = 10_000.0;
const POSITIONS: u32 = 50;

/// A test case.
#[derive(Debug, Clone, Copy)]
struct RopeCase {
    heads: [u32; 2],
    /// `[head_dim, rotary_dim]`
    dims: [u32; 2],
    style: RopeStyle,
    angles: Angles,
    in_place: bool,
}

#[test]
fn heads_of_all_sizes() {
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        for (angles, in_place) in [(Angles::Table, false), (Angles::Table, true), (Angles::Turns, true)] {
            let case = |heads, dims| RopeCase { heads, dims, style, angles, in_place };
            for dims in
                [[16, 16], [64, 64], [80, 32], [128, 128], [128, 64], [192, 96], [72, 64], [7, 6], [30, 2]]
            {
                run::<bf16, bf16>(case([5, 2], dims), 3, 0);
                run::<f32, bf16>(RopeCase { in_place: false, ..case([8, 2], dims) }, 3, 0);
            }
            // one tensor alone, partial head groups, and more threads per token than a CTA has
            run::<f16, f16>(case([4, 0], [32, 32]), 5, 1);
            run::<f16, f16>(case([0, 1], [32, 16]), 4, 1);
            run::<f32, f32>(case([9, 3], [24, 8]), 7, 2);
            run::<bf16, bf16>(case([150, 150], [128, 112]), 2, 3);
        }
    }
}

#[test]
fn many_seeds() {
    for seed in 0..SEEDS {
        let (angles, in_place) = (Angles::Table, seed % 2 == 0);
        let case = |style| RopeCase { heads: [6, 2], dims: [64, 32], style, angles, in_place };
        run::<bf16, bf16>(case(RopeStyle::Neox), 5, seed);
        run::<f16, f16>(case(RopeStyle::Interleaved), 5, seed);
    }
}

fn embedding(case: RopeCase) -> Embedding {
    Embedding::new(case.dims[1] as usize, THETA).expect("an embedding").with_style(case.style)
}

/// Uploads the angle array of the kernel.
fn angles(case: RopeCase, memory: &mut Memory) -> u64 {
    match case.angles {
        Angles::Table => memory.alloc_from(&table(case)),
        Angles::Turns => {
            let turns: Vec<u64> = embedding(case).frequencies().into_iter().map(turns).collect();
            memory.alloc_from(&turns)
        }
    }
}

/// Table of the engine.
fn table(case: RopeCase) -> Vec<f32> {
    let cache = CosSinCache::new(&embedding(case), POSITIONS).expect("a small table");
    cache.view().as_slice::<f32>().expect("f32").to_vec()
}

fn rotated(case: RopeCase, head: &[f64], position: i32) -> Vec<f64> {
    let rotary = case.dims[1] as usize;
    let angle = |pair| f64::from(position) * frequency(pair, rotary, THETA);
    rotate(head, &(0..rotary / 2).map(angle).collect::<Vec<_>>(), case.style)
}

fn launch(what: &str, call: RopeParams, seed: u64, memory: &mut Memory) {
    let kernel = rope("rope", call.config()).expect("a valid kernel");
    let (grid, args) = call.launch();
    simulate(&format!("{what} {call:?}"), &kernel, (grid, &args), seed, memory);
}

/// q and k in one tensor: per token the heads of q, then of k, then 8 other elements. Results are dense. In place
/// both dtypes are equal.
fn run<T: Real, To: Real>(case: RopeCase, tokens: usize, seed: u64) {
    let (dim, heads) = (case.dims[0] as usize, case.heads.map(|heads| heads as usize));
    let (all, mut memory) = (heads[0] + heads[1], Memory::new());
    let stride = all * dim + 8;
    let x = noise::<T>(tokens * stride, seed + 1);
    let positions: Vec<i32> = (0..tokens as i32).map(|token| (token * 19 + 3) % POSITIONS as i32).collect();
    let element = size_of::<T>();
    let q_at = memory.alloc_from(&x);
    let fused = [0, heads[0] * dim * element].map(|offset| q_at + offset as u64);
    let from = fused.map(|address| Strided { address, strides: [stride as u64, dim as u64] });
    let to = match case.in_place {
        true => from,
        false => heads.map(|heads| Strided {
            address: memory.alloc((heads * dim * tokens).max(1) * size_of::<To>()),
            strides: [(heads * dim) as u64, dim as u64],
        }),
    };
    let call = RopeParams {
        dtypes: (T::DTYPE, To::DTYPE),
        style: case.style,
        angles: case.angles,
        angles_address: angles(case, &mut memory),
        positions: memory.alloc_from(&positions),
        tokens: tokens as u32,
        heads: case.heads,
        dims: case.dims,
        from,
        to,
        rest: None,
        factors: None,
    };
    let what = format!("{case:?}, {tokens} tokens of {} to {}", T::PTX, To::PTX);
    launch(&what, call, seed, &mut memory);
    for (token, head) in (0..tokens).flat_map(|token| (0..all).map(move |head| (token, head))) {
        let before = &x[token * stride + head * dim..][..dim];
        let is_k = usize::from(head >= heads[0]);
        let to = to[is_k];
        let at = token as u64 * to.strides[0] + (head - is_k * heads[0]) as u64 * to.strides[1];
        let at = to.address + at * size_of::<To>() as u64;
        let found: Vec<To> = memory.read(at, dim).expect("a head that was written");
        let expected = rotated(case, &wide(before), positions[token]);
        for (i, expected) in expected.into_iter().enumerate() {
            let what = format!("{what}: token {token}, head {head}, element {i}");
            assert_near(&what, found[i], expected, (4e-7, 2.0));
        }
        let (kept, rounded) = (case.dims[1] as usize.., before.iter().map(|x| To::of(x.wide())));
        assert_eq!(found[kept.clone()], rounded.collect::<Vec<_>>()[kept], "{what}: behind rotary_dim");
    }
    for token in (0..tokens).filter(|_| case.in_place) {
        let end = (token + 1) * stride - 8;
        let behind: Vec<T> = memory.read(q_at + (end * element) as u64, 8).expect("8");
        assert_eq!(behind, x[end..][..8], "{what}: behind token {token}");
    }
}

#[test]
fn results_of_8_bits_are_scaled() {
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        for (dims, split) in [([64, 64], false), ([96, 32], false), ([96, 32], true), ([13, 6], true)] {
            quantize_heads(
                RopeCase { heads: [8, 4], dims, style, angles: Angles::Table, in_place: false },
                split,
            );
        }
    }
}

/// Dense heads of bf16 to dense ones of e4m3; with `split` the elements beyond `rotary_dim` are in tensors of their own.
fn quantize_heads(case: RopeCase, split: bool) {
    const TOKENS: usize = 3;
    // many results of q are subnormal, many of k saturate
    let (mut memory, factors, positions) = (Memory::new(), [0.0625_f32, 1000.0], [7, 0, 49]);
    let [dim, rotary] = case.dims.map(|dim| dim as usize);
    let part = if split { rotary } else { dim };
    let heads = case.heads.map(|heads| heads as usize);
    let mut place = |heads: usize, width: usize, bytes: &[u8]| Strided {
        address: memory.alloc_bytes(bytes),
        strides: [heads * width, width].map(|stride| stride as u64),
    };
    let x = [0, 1].map(|i| noise::<bf16>(TOKENS * heads[i] * dim, 9 + i as u64));
    let columns = |i: usize, columns: std::ops::Range<usize>| -> Vec<u8> {
        let of = |head: &[bf16]| {
            head[columns.clone()].iter().flat_map(|x| x.to_bits().to_le_bytes()).collect::<Vec<_>>()
        };
        x[i].chunks(dim).flat_map(of).collect()
    };
    let from = [0, 1].map(|i| place(heads[i], part, &columns(i, 0..part)));
    let to = [0, 1].map(|i| place(heads[i], part, &vec![0; TOKENS * heads[i] * part]));
    let rest = dim - rotary;
    let rest_from = [0, 1].map(|i| place(heads[i], rest, &columns(i, rotary..dim)));
    let rest_to = [0, 1].map(|i| place(heads[i], rest, &vec![0; TOKENS * heads[i] * rest]));
    let call = RopeParams {
        dtypes: (Dtype::Bf16, Dtype::E4m3),
        style: case.style,
        angles: case.angles,
        angles_address: angles(case, &mut memory),
        positions: memory.alloc_from(&positions),
        tokens: TOKENS as u32,
        heads: case.heads,
        dims: case.dims,
        from,
        to,
        rest: split.then_some([rest_from[0], rest_from[1], rest_to[0], rest_to[1]]),
        factors: Some(factors),
    };
    launch("8 bits", call, 0, &mut memory);
    for (i, row) in [0, 1].into_iter().flat_map(|i| (0..TOKENS * heads[i]).map(move |row| (i, row))) {
        let read = |at: Strided, width: usize| {
            let mut bytes = vec![0; width];
            memory.copy_to(at.address + (row * width) as u64, &mut bytes).expect("a head");
            bytes
        };
        let mut found = read(to[i], part);
        if split {
            found.extend(read(rest_to[i], rest));
        }
        let expected = rotated(case, &wide(&x[i][row * dim..][..dim]), positions[row / heads[i]]);
        for (column, (&found, expected)) in found.iter().zip(expected).enumerate() {
            let bound = |error: f64| quantize(Dtype::E4m3, (expected + error) * f64::from(factors[i]));
            let (low, high, found) = (bound(-1e-6), bound(1e-6), decode(Dtype::E4m3, found));
            let what = format!("{case:?} {split}: tensor {i}, row {row}, element {column}");
            assert!((low..=high).contains(&found), "{what} is {found}, expected {low} to {high}");
        }
    }
}

#[test]
fn angles_of_far_positions_are_exact() {
    let case = RopeCase {
        heads: [1, 0],
        dims: [64, 64],
        style: RopeStyle::Neox,
        angles: Angles::Turns,
        in_place: true,
    };
    let positions = [0, 1, 131_071, 1_000_003, i32::MAX - 1];
    let (x, mut memory) = (noise::<f32>(64 * positions.len(), 1), Memory::new());
    let at = Strided { address: memory.alloc_from(&x), strides: [64, 64] };
    let call = RopeParams {
        dtypes: (Dtype::F32, Dtype::F32),
        style: case.style,
        angles: case.angles,
        angles_address: angles(case, &mut memory),
        positions: memory.alloc_from(&positions),
        tokens: positions.len() as u32,
        heads: case.heads,
        dims: case.dims,
        from: [at; 2],
        to: [at; 2],
        rest: None,
        factors: None,
    };
    launch("far positions", call, 0, &mut memory);
    let found: Vec<f32> = memory.read(at.address, x.len()).expect("tokens");
    for ((found, before), position) in found.chunks(64).zip(x.chunks(64)).zip(positions) {
        for (&found, expected) in found.iter().zip(rotated(case, &wide(before), position)) {
            let angle = f64::from(position) * 1e-15;
            assert_near(&format!("position {position}"), found, expected, (3e-7 + angle, 2.0));
        }
    }
}

#[test]
fn offsets_have_64_bits() {
    // the simulator places allocations 2^32 bytes apart; with this stride token 2 begins at element 2^32
    let case = RopeCase {
        heads: [1, 0],
        dims: [16, 16],
        style: RopeStyle::Neox,
        angles: Angles::Table,
        in_place: true,
    };
    let mut memory = Memory::new();
    let tokens = [1, 2, 3].map(|seed| noise::<bf16>(16, seed));
    let at = tokens.each_ref().map(|token| memory.alloc_from(token));
    let rows = Strided { address: at[0], strides: [1 << 31, 16] };
    let call = RopeParams {
        dtypes: (Dtype::Bf16, Dtype::Bf16),
        style: case.style,
        angles: case.angles,
        angles_address: angles(case, &mut memory),
        positions: memory.alloc_from(&[7, 9, 4]),
        tokens: 3,
        heads: case.heads,
        dims: case.dims,
        from: [rows; 2],
        to: [rows; 2],
        rest: None,
        factors: None,
    };
    launch("far tokens", call, 0, &mut memory);
    for (token, (at, position)) in tokens.iter().zip(at.into_iter().zip([7, 9, 4])) {
        let found: Vec<bf16> = memory.read(at, 16).expect("a token");
        for (found, expected) in found.into_iter().zip(rotated(case, &wide(token), position)) {
            assert_near("far token", found, expected, (3e-7, 2.0));
        }
    }
}
