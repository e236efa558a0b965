//! Appending to pages.

use crate::{
    real::{Real, noise},
    simulate::{SEEDS, args, simulate},
};
use half::{bf16, f16};
use tilewright_kernels::append::{Append, append};
use tilewright_ptx::sim::Memory;

/// Pages of a cache, more than requests have.
const PAGES: usize = 12;
const INDPTR: [u32; 4] = [0, 3, 3, 7];
const INDICES: [u32; 7] = [5, 0, 11, 7, 2, 3, 9];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    Nhd,
    Hnd,
}

fn config(kv_heads: u32, head_dims: (u32, u32), page_size: u32) -> Append {
    Append { kv_heads, head_dims, page_size }
}

#[test]
fn tokens_go_to_their_slots() {
    for layout in [Layout::Nhd, Layout::Hnd] {
        for page_size in [1, 5, 16] {
            run::<bf16>(config(2, (64, 64), page_size), layout, 0);
            run::<f16>(config(3, (24, 16), page_size), layout, 1);
            run::<f32>(config(1, (4, 8), page_size), layout, 2);
            // more threads a token than a CTA has
            run::<bf16>(config(40, (256, 128), page_size), layout, 3);
        }
    }
}

#[test]
fn whatever_the_timing() {
    (0..SEEDS).for_each(|seed| run::<bf16>(config(3, (40, 72), 3), Layout::Nhd, seed));
}

/// Elements of a page, and how far slots and heads are apart.
fn strides(layout: Layout, config: Append, dim: usize) -> [usize; 3] {
    let (heads, size) = (config.kv_heads as usize, config.page_size as usize);
    match layout {
        Layout::Nhd => [size * heads * dim, heads * dim, dim],
        Layout::Hnd => [size * heads * dim, dim, size * dim],
    }
}

/// Every slot of requests 0 and 2, out of order, and tokens that go nowhere among them, whose positions mean nothing.
fn tokens(page_size: u32) -> Vec<(i32, i32)> {
    let slots = |request: i32, pages: u32| (0..(pages * page_size) as i32).map(move |at| (request, at));
    let mut tokens: Vec<_> = slots(0, 3).chain(slots(2, 4)).step_by(2).collect();
    tokens.reverse();
    tokens.insert(1, (-1, 1 << 30));
    tokens.push((-1, 0));
    tokens
}

fn run<T: Real>(config: Append, layout: Layout, seed: u64) {
    let kernel = append::<T>("append", config).expect("a valid kernel");
    let (tokens, heads, mut memory) = (tokens(config.page_size), config.kv_heads as usize, Memory::new());
    let dims = [config.head_dims.0 as usize, config.head_dims.1 as usize];
    let new_stride = dims.map(|dim| heads * dim + 8);
    let new = new_stride.map(|stride| noise::<T>(tokens.len() * stride, seed + stride as u64));
    let slots = PAGES * config.page_size as usize;
    let before = dims.map(|dim| noise::<T>(slots * heads * dim, seed + 7));
    let [k, v] = [0, 1].map(|i| memory.alloc_from(&new[i]));
    let caches = [0, 1].map(|i| memory.alloc_from(&before[i]));
    let (requests, positions): (Vec<i32>, Vec<i32>) = tokens.iter().copied().unzip();
    let table = [memory.alloc_from(&requests), memory.alloc_from(&positions)];
    let pages = [memory.alloc_from(&INDPTR), memory.alloc_from(&INDICES)];
    let wide = [0, 1].map(|i| {
        let [page, slot, head] = strides(layout, config, dims[i]).map(|stride| stride as u64);
        [new_stride[i] as u64, dims[i] as u64, page, slot, head]
    });
    let addresses = [[k, v], caches, table, pages].concat();
    let arguments = args(&addresses, &[tokens.len() as u32], &wide.concat());
    let what = format!("{config:?} {layout:?} of {}", T::PTX);
    let grid = config.grid::<T>(tokens.len() as u32);
    simulate(&what, &kernel, (grid, &arguments), seed, &mut memory);
    for i in 0..2 {
        let (mut expected, dim) = (before[i].clone(), dims[i]);
        let [page_stride, slot_stride, head_stride] = strides(layout, config, dim);
        for (token, &(request, position)) in
            tokens.iter().enumerate().filter(|(_, (request, _))| *request >= 0)
        {
            let (page, slot) = (
                position as usize / config.page_size as usize,
                position as usize % config.page_size as usize,
            );
            let page = INDICES[INDPTR[request as usize] as usize + page] as usize;
            for head in 0..heads {
                let to = page * page_stride + slot * slot_stride + head * head_stride;
                let from = token * new_stride[i] + head * dim;
                expected[to..to + dim].copy_from_slice(&new[i][from..from + dim]);
            }
        }
        let found: Vec<T> = memory.read(caches[i], expected.len()).expect("a cache");
        let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        assert_eq!(wrong, None, "{what}: {}", ["k", "v"][i]);
    }
}

#[test]
fn offsets_have_64_bits() {
    // allocations are 2^32 bytes apart in the simulator: page 1 of this stride is in the next one
    let (config, mut memory) = (config(1, (8, 8), 1), Memory::new());
    let new = noise::<bf16>(16, 1);
    let [near, far] = [0, 1].map(|_| memory.alloc_from(&[bf16::ZERO; 8]));
    let [k, requests, positions] =
        [memory.alloc_from(&new), memory.alloc_from(&[0, 0]), memory.alloc_from(&[0, 1])];
    let [indptr, indices] = [memory.alloc_from(&[0_u32, 2]), memory.alloc_from(&[1_u32, 0])];
    let v_cache = memory.alloc_from(&[bf16::ZERO; 16]);
    let addresses = [k, k, near, v_cache, requests, positions, indptr, indices];
    let arguments = args(&addresses, &[2], &[8, 8, 1 << 31, 8, 8, 8, 8, 8, 8, 8]);
    let kernel = append::<bf16>("append", config).expect("a valid kernel");
    simulate("far pages", &kernel, (config.grid::<bf16>(2), &arguments), 0, &mut memory);
    assert_eq!(memory.read::<bf16>(far, 8).expect("page 1"), new[..8]);
    assert_eq!(memory.read::<bf16>(near, 8).expect("page 0"), new[8..]);
}

#[test]
fn refuses_heads_that_are_no_vectors() {
    let error = |config| append::<bf16>("append", config).expect_err("refused").to_string();
    assert_eq!(
        error(config(1, (64, 20), 16)),
        "kernel append: head_dims.1 = 20, expected a multiple of 8 in 8..=65536"
    );
    assert_eq!(error(config(0, (64, 64), 16)), "kernel append: kv_heads = 0, expected 1..=4096");
    assert_eq!(error(config(1, (64, 64), 0)), "kernel append: page_size = 0, expected at least 1");
}
