//! Appends, RoPE and merges of states.

use super::{BundledMachine, DTYPES, judge, memory, view, view_mut};
use tilewright::{
    DeviceMemory, Dtype, KvCacheMut, KvLayout, PageTable, Result,
    attention::{merge_state, merge_states},
    kv::{
        Scale, ScaleMut, SlotArrays,
        append::{NewKv, NewTokens, QuantizedCacheMut, append_paged_kv_cache_quantized, append_to_slots},
        mla::{MlaCacheMut, NewMla, append_mla_to_slots},
    },
    rope::{CosSinCache, Positions, Rope, RopeStyle, apply_rope, apply_rope_with_cos_sin_cache},
};
use tilewright_cuda::Gpu;

const TOKENS: usize = 4;
const HEADS: usize = 8;
const PAGE_SIZE: usize = 16;

/// Slots of tokens in arrays of device memory.
fn slots(arrays: &[DeviceMemory; 4], is_mapping: bool) -> Result<SlotArrays<'_>> {
    let [batch_indices, positions, indptr, indices] = arrays;
    Ok(match is_mapping {
        true => SlotArrays::Mapping { slot_mapping: positions.integers(0, TOKENS)?, page_size: PAGE_SIZE },
        false => SlotArrays::Paged {
            batch_indices: batch_indices.indices(0, TOKENS)?,
            positions: positions.indices(0, TOKENS)?,
            indptr: indptr.indices(0, 2)?,
            indices: indices.indices(0, 2)?,
            page_size: PAGE_SIZE,
        },
    })
}

fn append(gpu: &Gpu<BundledMachine>, dtype: Dtype, cache: Dtype, dim: usize) -> Result<()> {
    let (new, pages) = ([TOKENS, HEADS, dim], [2, PAGE_SIZE, HEADS, dim]);
    let (k, v) = (memory(gpu, &new), memory(gpu, &new));
    let (mut k_cache, mut v_cache) = (memory(gpu, &pages), memory(gpu, &pages));
    let arrays = [(); 4].map(|()| memory(gpu, &[2 * TOKENS]));
    let scale = || ScaleMut::Static(if cache == dtype { Scale::One } else { Scale::Tensor(0.5) });
    let (k, v) = (view(&k, dtype, &new), view(&v, dtype, &new));
    for form in [Some(false), Some(true), None] {
        let caches =
            KvCacheMut { k: view_mut(&mut k_cache, cache, &pages), v: view_mut(&mut v_cache, cache, &pages) };
        let caches = QuantizedCacheMut { cache: caches, k_scale: scale(), v_scale: scale() };
        let Some(is_mapping) = form else {
            let tokens = NewTokens { k, v, batch_indices: &[0; TOKENS], positions: &[0, 1, 2, 3] };
            let table = PageTable::new(&[0, 2], &[0, 1], &[4], PAGE_SIZE);
            return append_paged_kv_cache_quantized(gpu, &tokens, caches, KvLayout::Nhd, &table);
        };
        append_to_slots(gpu, NewKv { k, v }, caches, KvLayout::Nhd, &slots(&arrays, is_mapping)?)?;
    }
    Ok(())
}

#[test]
fn appends() {
    judge(|gpu| {
        for dtype in DTYPES {
            for cache in [dtype, Dtype::E4m3] {
                append(gpu, dtype, cache, 64)?;
                append(gpu, dtype, cache, 128)?;
            }
            let (ckv, kpe) = (memory(gpu, &[TOKENS, 512]), memory(gpu, &[TOKENS, 64]));
            let (mut ckv_cache, mut kpe_cache) = (memory(gpu, &[32, 512]), memory(gpu, &[32, 64]));
            let arrays = [(); 4].map(|()| memory(gpu, &[2 * TOKENS]));
            for is_mapping in [false, true] {
                let new =
                    NewMla { ckv: view(&ckv, dtype, &[TOKENS, 512]), kpe: view(&kpe, dtype, &[TOKENS, 64]) };
                let cache = MlaCacheMut {
                    ckv: view_mut(&mut ckv_cache, dtype, &[2, PAGE_SIZE, 512]),
                    kpe: view_mut(&mut kpe_cache, dtype, &[2, PAGE_SIZE, 64]),
                };
                append_mla_to_slots(gpu, new, cache, &slots(&arrays, is_mapping)?)?;
            }
        }
        Ok(())
    });
}

#[test]
fn rotations() {
    judge(|gpu| {
        for dtype in DTYPES {
            for dim in [64, 128] {
                for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
                    let rope = Rope::new(dim, 1e4)?.with_style(style);
                    let shape = [TOKENS, HEADS, dim];
                    let (mut q, mut k) = (memory(gpu, &shape), memory(gpu, &shape));
                    let at = memory(gpu, &[TOKENS]);
                    let at = || at.indices(0, TOKENS).map(Positions::Indices);
                    let table = CosSinCache::new(&rope, 64)?;
                    for is_table in [false, true] {
                        let (q, k) = (view_mut(&mut q, dtype, &shape), view_mut(&mut k, dtype, &shape));
                        match is_table {
                            false => apply_rope(gpu, q, k, at()?, &rope)?,
                            true => apply_rope_with_cos_sin_cache(gpu, q, k, at()?, &table)?,
                        }
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn merges() {
    judge(|gpu| {
        for dtype in DTYPES {
            for dim in [64, 128, 512] {
                let (one, many) = ([TOKENS, HEADS, dim], [TOKENS, 2, HEADS, dim]);
                let (mut o, mut lse) = (memory(gpu, &one), memory(gpu, &one));
                let (states, lses) = (memory(gpu, &many), memory(gpu, &many));
                let f32 = Dtype::F32;
                let (of_many, of_one) = ([TOKENS, 2, HEADS], [TOKENS, HEADS]);
                let (o_out, lse_out) = (view_mut(&mut o, dtype, &one), view_mut(&mut lse, f32, &of_one));
                merge_states(gpu, view(&states, dtype, &many), view(&lses, f32, &of_many), o_out, lse_out)?;
                let (o_out, lse_out) = (view_mut(&mut o, dtype, &one), view_mut(&mut lse, f32, &of_one));
                merge_state(gpu, o_out, lse_out, view(&states, dtype, &one), view(&lses, f32, &of_one))?;
            }
        }
        Ok(())
    });
}
