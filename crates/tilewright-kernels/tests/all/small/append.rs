//! Appending to pages.

use super::{SEEDS, simulate};
use crate::real::{Real, noise};
use half::{bf16, f16};
use tilewright::{Dtype, E4m3, E5m2, Element};
use tilewright_kernels::{
    append::{AppendParams, Cache, Scale, SlotMapping, SlotMappingKind, SlotTable, append},
    tile::Strided,
};
use tilewright_ptx::Memory;

/// Pages of the cache, more than requests use.
const PAGES: usize = 12;
const INDPTR: [u32; 4] = [0, 3, 3, 7];
const INDICES: [u32; 7] = [5, 0, 11, 7, 2, 3, 9];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    Nhd,
    Hnd,
}

/// Heads, elements of a head, tokens of a page.
type Shape = (u32, u32, u32);

#[test]
fn tokens_go_to_their_slots() {
    let kinds = [
        (Layout::Nhd, SlotMappingKind::Slots),
        (Layout::Hnd, SlotMappingKind::Unchecked),
        (Layout::Nhd, SlotMappingKind::Numbers),
        (Layout::Hnd, SlotMappingKind::Numbers),
    ];
    for (layout, kind) in kinds {
        for page_size in [1, 5, 16] {
            // 100 threads per token: a CTA has two tokens and a rest
            run::<bf16>((8, 200, page_size), layout, (kind, 0));
            run::<f16>((3, 24, page_size), layout, (kind, 1));
            run::<f32>((1, 4, page_size), layout, (kind, 2));
            run::<bf16>((3, 13, page_size), layout, (kind, 2));
            // more threads per token than a CTA has
            run::<bf16>((40, 256, page_size), layout, (kind, 3));
        }
    }
}

#[test]
fn many_seeds() {
    let kinds = [SlotMappingKind::Slots, SlotMappingKind::Unchecked, SlotMappingKind::Numbers];
    (0..SEEDS).for_each(|seed| run::<bf16>((3, 40, 3), Layout::Nhd, (kinds[seed as usize % 3], seed)));
}

/// Strides of pages, slots and heads.
fn strides(layout: Layout, (heads, dim, size): Shape) -> [u64; 3] {
    let [heads, dim, size] = [heads, dim, size].map(u64::from);
    match layout {
        Layout::Nhd => [size * heads * dim, heads * dim, dim],
        Layout::Hnd => [size * heads * dim, dim, size * dim],
    }
}

/// Every slot of requests 0 and 2, out of order, with skipped tokens among them.
fn tokens(page_size: u32) -> Vec<(i32, i32)> {
    let slots = |request: i32, pages: u32| (0..(pages * page_size) as i32).map(move |at| (request, at));
    let mut tokens: Vec<_> = slots(0, 3).chain(slots(2, 4)).step_by(2).collect();
    tokens.reverse();
    tokens.insert(1, (-1, 1 << 30));
    tokens.push((-1, 0));
    tokens
}

/// Page and slot of a token.
fn place((request, position): (i32, i32), page_size: u32) -> [u32; 2] {
    let (page, slot) = (position as u32 / page_size, position as u32 % page_size);
    [INDICES[(INDPTR[request as usize] + page) as usize], slot]
}

fn launch(what: &str, call: AppendParams, seed: u64, memory: &mut Memory) {
    let kernel = append("append", call.config()).expect("a valid kernel");
    let (grid, args) = call.launch();
    simulate(&format!("{what} {call:?}"), &kernel, (grid, &args), seed, memory);
}

fn table(tokens: &[(i32, i32)], pages: [&[u32]; 2], page_size: u32, memory: &mut Memory) -> SlotTable {
    let (requests, positions): (Vec<i32>, Vec<i32>) = tokens.iter().copied().unzip();
    SlotTable {
        batch_indices: memory.alloc_from(&requests),
        positions: memory.alloc_from(&positions),
        indptr: memory.alloc_from(pages[0]),
        indices: memory.alloc_from(pages[1]),
        page_size,
    }
}

/// The slot mapping of `tokens` as arrays in `memory`.
fn mapping(kind: SlotMappingKind, tokens: &[(i32, i32)], page_size: u32, memory: &mut Memory) -> SlotMapping {
    let kept = || tokens.iter().enumerate().filter(|(_, (request, _))| *request >= 0);
    match kind {
        SlotMappingKind::Slots => {
            let slots =
                kept().flat_map(|(token, &at)| [vec![token as u32], place(at, page_size).to_vec()].concat());
            SlotMapping::Slots {
                slots: memory.alloc_from(&slots.collect::<Vec<_>>()),
                count: kept().count() as u32,
            }
        }
        SlotMappingKind::Unchecked => {
            // without pages; beyond the pages; request 3 has pages that the cache lacks, 4 bounds beyond the indices;
            // with few indices, request 2 has the last
            let size = page_size as i32;
            let without_slot = [(1, 0), (0, -1), (2, 4 * size), (0, i32::MAX), (3, 0), (3, size), (4, 0)];
            let without_request = [(5, 0), (i32::MIN, 0)];
            let all = [tokens, &without_slot, &without_request].concat();
            let indptr = [&INDPTR[..], &[9, u32::MAX]].concat();
            let indices = [&INDICES[..], &[PAGES as u32, u32::MAX]].concat();
            SlotMapping::Unchecked {
                table: table(&all, [&indptr, &indices], page_size, memory),
                num_requests: 5,
                num_indices: if page_size == 1 { 9 } else { 7 },
                num_pages: PAGES as u32,
                count: all.len() as u32,
            }
        }
        SlotMappingKind::Numbers => {
            let num_slots = PAGES as u32 * page_size;
            let number = |&(request, position): &(i32, i32)| match request {
                0.. => {
                    let [page, slot] = place((request, position), page_size);
                    i64::from(page * page_size + slot)
                }
                _ => -1,
            };
            let wrong = [num_slots.into(), i64::MIN, i64::MAX, 1 << 32, -2];
            let numbers: Vec<i64> = tokens.iter().map(number).chain(wrong).collect();
            let count = numbers.len() as u32;
            SlotMapping::Numbers { numbers: memory.alloc_from(&numbers), page_size, num_slots, count }
        }
    }
}

fn run<T: Real>(shape: Shape, layout: Layout, (kind, seed): (SlotMappingKind, u64)) {
    let (tokens, mut memory) = (tokens(shape.2), Memory::new());
    let slot_mapping = mapping(kind, &tokens, shape.2, &mut memory);
    let (heads, dim) = (shape.0 as usize, shape.1 as usize);
    let new_stride = heads * dim + 8;
    // the rows of tokens without a slot follow
    let new = noise::<T>((tokens.len() + 10) * new_stride, seed + 3);
    let before = noise::<T>(PAGES * shape.2 as usize * heads * dim, seed + 7);
    let kept = || tokens.iter().enumerate().filter(|(_, (request, _))| *request >= 0);
    let strides = strides(layout, shape);
    let call = AppendParams {
        dtypes: (T::DTYPE, T::DTYPE),
        shape: [shape.0, shape.1],
        new: Strided { address: memory.alloc_from(&new), strides: [new_stride as u64, dim as u64] },
        cache: Cache { address: memory.alloc_from(&before), strides },
        slot_mapping,
        scale: None,
    };
    launch(&format!("{layout:?}"), call, seed, &mut memory);
    let mut expected = before;
    for (token, &at) in kept() {
        let [page, slot] = place(at, shape.2).map(u64::from);
        for head in 0..heads {
            let to = (page * strides[0] + slot * strides[1] + head as u64 * strides[2]) as usize;
            expected[to..to + dim].copy_from_slice(&new[token * new_stride + head * dim..][..dim]);
        }
    }
    let found: Vec<T> = memory.read(call.cache.address, expected.len()).expect("a cache");
    let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
    assert_eq!(wrong, None, "{call:?}");
}

/// Numbers whose quotients are special, subnormal, or halfway between two values; divided by 0.5 they are exact.
const NUMBERS: [f32; 16] = [
    f32::NAN,
    f32::INFINITY,
    -1e30,
    -0.0,
    1e-12,
    447.0,
    0.53125,
    0.59375,
    0.5625,
    -0.6875,
    1.5 / 1024.0,
    2.5 / 1024.0,
    1.5 / 131_072.0,
    -0.3,
    9.0,
    0.01,
];

/// Every 8-bit dtype, at width 8 and 1, each number at each position: the same bytes as the rounding of the engine.
#[test]
fn values_are_divided_and_rounded_as_the_engine_does() {
    let cases = [16, 15].into_iter().flat_map(|dim| [false, true].map(|uniform| (dim, uniform)));
    for (dtype, (dim, uniform)) in [Dtype::E4m3, Dtype::E5m2, Dtype::I8]
        .into_iter()
        .flat_map(|dtype| cases.clone().map(move |of| (dtype, of)))
    {
        let mut memory = Memory::new();
        // the tokens of slots 0..dim of page 1, in three heads
        let new: Vec<f32> = (0..3 * dim * dim).map(|at| NUMBERS[(at / (3 * dim) + at % dim) % dim]).collect();
        let slots: Vec<u32> = (0..dim as u32).flat_map(|at| [at, 1, at]).collect();
        let scales = if uniform { [0.3; 3] } else { [0.5, 0.3, 0.7] };
        let of_pages = memory.alloc_from(&[9.0, 9.0, 9.0, 9.0, scales[0], 9.0, scales[1], 9.0, scales[2]]);
        let (at, factor) = if uniform { (0, 0.3) } else { (of_pages, 9.0) };
        let (head, page) = (dim as u64, 3 * (dim * dim) as u64);
        let call = AppendParams {
            dtypes: (Dtype::F32, dtype),
            shape: [3, dim as u32],
            new: Strided { address: memory.alloc_from(&new), strides: [3 * head, head] },
            cache: Cache { address: memory.alloc(6 * dim * dim), strides: [page, 3 * head, head] },
            slot_mapping: SlotMapping::Slots { slots: memory.alloc_from(&slots), count: dim as u32 },
            scale: Some(Scale { at, page_stride: 4, head_stride: 2, factor }),
        };
        launch("8 bits", call, 0, &mut memory);
        let mut found = vec![0; new.len()];
        memory.copy_to(call.cache.address + page, &mut found).expect("page 1");
        let byte = |(at, x): (usize, &f32)| {
            let x = x / scales[at / dim % 3];
            match dtype {
                Dtype::E4m3 => E4m3::from_f32(x).to_bits(),
                Dtype::E5m2 => E5m2::from_f32(x).to_bits(),
                _ => <i8 as Element>::from_f32(x).cast_unsigned(),
            }
        };
        assert_eq!(found, new.iter().enumerate().map(byte).collect::<Vec<_>>(), "{dtype}, {dim}, {uniform}");
    }
}

#[test]
fn offsets_have_64_bits() {
    // the simulator places allocations 2^32 bytes apart; with this stride page 2 begins at element 2^32
    let mut memory = Memory::new();
    let new = noise::<bf16>(16, 1);
    let [near, _, far] = [0; 3].map(|_| memory.alloc_from(&[bf16::ZERO; 8]));
    let call = AppendParams {
        dtypes: (Dtype::Bf16, Dtype::Bf16),
        shape: [1, 8],
        new: Strided { address: memory.alloc_from(&new), strides: [8, 8] },
        cache: Cache { address: near, strides: [1 << 31, 8, 8] },
        slot_mapping: SlotMapping::Slots { slots: memory.alloc_from(&[0_u32, 2, 0, 1, 0, 0]), count: 2 },
        scale: None,
    };
    launch("far pages", call, 0, &mut memory);
    assert_eq!(memory.read::<bf16>(far, 8).expect("page 2"), new[..8]);
    assert_eq!(memory.read::<bf16>(near, 8).expect("page 0"), new[8..]);
}
