//! Append of tokens to paged caches, and lookup of their slots.

use crate::{elements::Elements, generator::Generator};
use tilewright::{
    Backend, Dtype, KvCacheMut, KvLayout, PageTable,
    kv::{
        Scale, ScaleMut, SlotArrays,
        append::{
            NewKv, NewTokens, QuantizedCacheMut, append_paged_kv_cache, append_to_slots,
            get_batch_indices_positions,
        },
        get_seq_lens,
    },
};

const DTYPES: [Dtype; 6] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::E5m2, Dtype::I8];
const HEADS: usize = 3;
const DIMS: (usize, usize) = (9, 5);
/// Exact in every dtype.
const UNTOUCHED: f32 = -96.0;

/// Requests of `seq_lens` tokens, the last `append_lens` of them new, in a pool with spare pages.
struct Growth {
    page_size: usize,
    append_indptr: Vec<i64>,
    seq_lens: Vec<usize>,
    indptr: Vec<i64>,
    indices: Vec<i64>,
    last_page_len: Vec<i64>,
    pages: usize,
}

impl Growth {
    fn new(page_size: usize, requests: &[(usize, usize)]) -> Self {
        let (mut append_indptr, mut indptr) = (vec![0], vec![0]);
        for &(append, len) in requests {
            append_indptr.push(append_indptr[append_indptr.len() - 1] + append as i64);
            indptr.push(indptr[indptr.len() - 1] + len.div_ceil(page_size) as i64);
        }
        let owned = indptr[indptr.len() - 1] as usize;
        let pages = owned + 3;
        let order = Generator::new(5).permutation(pages);
        Self {
            page_size,
            append_indptr,
            seq_lens: requests.iter().map(|r| r.1).collect(),
            indptr,
            indices: order.into_iter().take(owned).map(|page| page as i64).collect(),
            last_page_len: requests
                .iter()
                .map(|r| (r.1 - r.1.saturating_sub(1) / page_size * page_size) as i64)
                .collect(),
            pages,
        }
    }

    fn table(&self) -> PageTable<'_> {
        PageTable::new(&self.indptr, &self.indices, &self.last_page_len, self.page_size)
    }

    fn tokens(&self) -> usize {
        self.append_indptr[self.append_indptr.len() - 1] as usize
    }

    /// Offset of `head` at `position` of request `r` in a dense cache of head_dim `dim`.
    fn offset(&self, layout: KvLayout, (r, position, head): (usize, usize, usize), dim: usize) -> usize {
        let page = self.indices[self.indptr[r] as usize + position / self.page_size] as usize;
        let slot = position % self.page_size;
        dim * match layout {
            KvLayout::Nhd => (page * self.page_size + slot) * HEADS + head,
            KvLayout::Hnd => (page * HEADS + head) * self.page_size + slot,
        }
    }

    /// Appends new tokens with `new_gap` elements between heads. Returns the tokens, rounded to the cache's dtype, and the K and
    /// V caches, as f32.
    fn append<B: Backend>(
        &self,
        backend: &B,
        (new_dtype, dtype, layout): (Dtype, Dtype, KvLayout),
        new_gap: usize,
    ) -> [(Vec<f32>, Vec<f32>); 2] {
        let (batch_indices, positions) =
            get_batch_indices_positions(&self.append_indptr, &self.seq_lens).expect("the lengths are sound");
        let fresh = |dim: usize, seed| {
            let dense =
                Elements::new(new_dtype, &Generator::new(seed).reals(self.tokens() * HEADS * dim)).to_f32();
            let mut memory = Elements::filled(new_dtype, self.tokens() * HEADS * (dim + new_gap), f32::NAN);
            for (at, values) in dense.chunks_exact(dim).enumerate() {
                memory.write(at * (dim + new_gap), values);
            }
            (Elements::new(dtype, &dense).to_f32(), memory)
        };
        let cache = |dim| Elements::filled(dtype, self.pages * self.page_size * HEADS * dim, UNTOUCHED);
        let ((k, k_memory), (v, v_memory)) = (fresh(DIMS.0, 1), fresh(DIMS.1, 2));
        let (mut k_cache, mut v_cache) = (cache(DIMS.0), cache(DIMS.1));
        let shape = |dim| layout.paged_shape(self.pages, self.page_size, HEADS, dim);
        let view = |memory: &Elements, dim: usize| -> Vec<usize> {
            assert_eq!(memory.to_f32().len(), self.tokens() * HEADS * (dim + new_gap));
            vec![HEADS * (dim + new_gap), dim + new_gap, 1]
        };
        let (k_strides, v_strides) = (view(&k_memory, DIMS.0), view(&v_memory, DIMS.1));
        let new = NewTokens {
            k: k_memory.strided(0, &[self.tokens(), HEADS, DIMS.0], &k_strides),
            v: v_memory.strided(0, &[self.tokens(), HEADS, DIMS.1], &v_strides),
            batch_indices: &batch_indices,
            positions: &positions,
        };
        let target = KvCacheMut { k: k_cache.view_mut(&shape(DIMS.0)), v: v_cache.view_mut(&shape(DIMS.1)) };
        append_paged_kv_cache(backend, &new, target, layout, &self.table()).expect("the tensors fit");
        [(k, k_cache.to_f32()), (v, v_cache.to_f32())]
    }

    /// Checks that each appended token is in its slot and that nothing else was written.
    fn check(&self, layout: KvLayout, dim: usize, (new, mut cache): (Vec<f32>, Vec<f32>)) {
        for r in 0..self.seq_lens.len() {
            let (begin, end) = (self.append_indptr[r] as usize, self.append_indptr[r + 1] as usize);
            for (token, head) in (begin..end).flat_map(|token| (0..HEADS).map(move |head| (token, head))) {
                let position = self.seq_lens[r] - (end - token);
                let at = self.offset(layout, (r, position, head), dim);
                let slot = &mut cache[at..at + dim];
                assert_eq!(slot, &new[(token * HEADS + head) * dim..][..dim], "token {token}, head {head}");
                slot.fill(UNTOUCHED);
            }
        }
        assert!(cache.iter().all(|value| *value == UNTOUCHED), "nothing else is touched");
    }
}

fn appended_tokens_are_in_their_slots_and_nothing_else_is_touched<B: Backend + Clone + Sync>(backends: &[B]) {
    let requests = [(1, 1), (0, 7), (3, 17), (0, 0), (16, 16), (5, 64), (70, 70)];
    for (page_size, gap) in [1, 5, 16, 64].into_iter().flat_map(|page| [0, 4].map(|gap| (page, gap))) {
        let growth = Growth::new(page_size, &requests);
        let dtypes = DTYPES.iter().flat_map(|&new| DTYPES.iter().map(move |&cache| (new, cache)));
        for ((new, cache), layout) in dtypes.flat_map(|d| [KvLayout::Nhd, KvLayout::Hnd].map(|l| (d, l))) {
            for cpu in backends {
                let [k, v] = growth.append(cpu, (new, cache, layout), gap);
                growth.check(layout, DIMS.0, k);
                growth.check(layout, DIMS.1, v);
            }
        }
    }
}

fn a_cache_with_gaps_takes_tokens_and_keeps_its_gaps<B: Backend + Clone + Sync>(backends: &[B]) {
    let growth = Growth::new(4, &[(2, 6), (1, 1)]);
    for (layout, cpu) in
        [KvLayout::Nhd, KvLayout::Hnd].iter().flat_map(|&l| backends.iter().map(move |c| (l, c)))
    {
        let (dim, page_gap) = (DIMS.0, 11);
        let [n, a, b, _] = layout.paged_shape(growth.pages, 4, HEADS, dim);
        let strides = [a * b * (dim + 2) + page_gap, b * (dim + 2), dim + 2, 1];
        let new = Elements::new(Dtype::F16, &Generator::new(3).reals(3 * HEADS * dim));
        let mut caches = [0, 1].map(|_| Elements::filled(Dtype::F16, n * strides[0], UNTOUCHED));
        let [k, v] = &mut caches;
        let view = new.view(&[3, HEADS, dim]);
        let append = NewTokens { k: view, v: view, batch_indices: &[0, 0, 1], positions: &[4, 5, 0] };
        let shape = [n, a, b, dim];
        let target =
            KvCacheMut { k: k.strided_mut(0, &shape, &strides), v: v.strided_mut(0, &shape, &strides) };
        append_paged_kv_cache(cpu, &append, target, layout, &growth.table()).expect("the tensors fit");
        for cache in caches {
            let mut cache = cache.to_f32();
            for (token, (r, position)) in [(0, 4), (0, 5), (1, 0)].into_iter().enumerate() {
                for head in 0..HEADS {
                    let row = growth.offset(layout, (r, position, head), 1);
                    let at = row / (a * b) * strides[0] + row % (a * b) * (dim + 2);
                    let values = &new.to_f32()[(token * HEADS + head) * dim..][..dim];
                    assert_eq!(&cache[at..at + dim], values, "{layout}: token {token}, head {head}");
                    cache[at..at + dim].fill(UNTOUCHED);
                }
            }
            assert!(cache.iter().all(|value| *value == UNTOUCHED), "gaps stay as they are");
        }
    }
}

/// Two requests share a page, and tokens of both map to one slot.
#[test]
fn slots_hold_one_token() {
    let mut caches = [0, 1].map(|_| Elements::filled(Dtype::F32, 2, UNTOUCHED));
    let [k, v] = &mut caches;
    let new = Elements::new(Dtype::F32, &[1.0, 2.0]);
    let view = new.view(&[2, 1, 1]);
    let append = NewTokens { k: view, v: view, batch_indices: &[1, 0], positions: &[1, 1] };
    let target = KvCacheMut { k: k.view_mut(&[1, 2, 1, 1]), v: v.view_mut(&[1, 2, 1, 1]) };
    let table = PageTable::new(&[0, 1, 2], &[0, 0], &[2, 2], 2);
    let result = append_paged_kv_cache(&crate::cpus(1)[0], &append, target, KvLayout::Nhd, &table);
    let text = "kv.append_paged_kv_cache: tokens 0 and 1 both go to slot 1 of page 0";
    assert_eq!(result.expect_err("it is refused").to_string(), text);
    for cache in caches {
        assert_eq!(cache.to_f32(), [UNTOUCHED, UNTOUCHED]);
    }
}

fn padding_is_skipped<B: Backend>(backends: &[B]) {
    for backend in backends {
        let mut caches = [0, 1].map(|_| Elements::filled(Dtype::F32, 2, UNTOUCHED));
        let [k, v] = &mut caches;
        let new = Elements::new(Dtype::F32, &[1.0, 2.0, 3.0]);
        let view = new.view(&[3, 1, 1]);
        let append = NewTokens { k: view, v: view, batch_indices: &[-1, 0, -1], positions: &[1, 1, -7] };
        let target = KvCacheMut { k: k.view_mut(&[1, 2, 1, 1]), v: v.view_mut(&[1, 2, 1, 1]) };
        let table = PageTable::new(&[0, 1], &[0], &[2], 2);
        append_paged_kv_cache(backend, &append, target, KvLayout::Nhd, &table).expect("the tensors fit");
        for cache in caches {
            assert_eq!(cache.to_f32(), [UNTOUCHED, 2.0]);
        }
    }
}

/// Appends three tokens of one value to a cache of two pages of two tokens.
fn appended_to<B: Backend>(backend: &B, arrays: &SlotArrays<'_>) -> tilewright::Result<Vec<f32>> {
    let mut caches = [0, 1].map(|_| Elements::filled(Dtype::F32, 4, UNTOUCHED));
    let [k, v] = &mut caches;
    let new = Elements::new(Dtype::F32, &[1.0, 2.0, 3.0]);
    let view = new.view(&[3, 1, 1]);
    let cache = KvCacheMut { k: k.view_mut(&[2, 2, 1, 1]), v: v.view_mut(&[2, 2, 1, 1]) };
    let (k_scale, v_scale) = (ScaleMut::Static(Scale::One), ScaleMut::Static(Scale::One));
    let cache = QuantizedCacheMut { cache, k_scale, v_scale };
    append_to_slots(backend, NewKv { k: view, v: view }, cache, KvLayout::Nhd, arrays)?;
    assert_eq!(caches[0].to_f32(), caches[1].to_f32());
    Ok(caches[0].to_f32())
}

fn slot_arrays_give_the_slots_of_tokens<B: Backend>(backends: &[B]) {
    let mapping = SlotArrays::Mapping { slot_mapping: (&[3, -1, 0]).into(), page_size: 2 };
    let paged = SlotArrays::Paged {
        batch_indices: (&[0, -1, 1]).into(),
        positions: (&[1, 9, 0]).into(),
        indptr: (&[0, 1, 2]).into(),
        indices: (&[1, 0]).into(),
        page_size: 2,
    };
    for (backend, arrays) in backends.iter().flat_map(|backend| [mapping, paged].map(|one| (backend, one))) {
        assert_eq!(appended_to(backend, &arrays), Ok(vec![3.0, UNTOUCHED, UNTOUCHED, 1.0]), "{arrays:?}");
    }
}

#[test]
fn slot_arrays_on_the_host_are_checked() {
    let refused = |arrays: SlotArrays<'_>, text: &str| {
        let error = appended_to(&crate::cpus(1)[0], &arrays).expect_err("it is refused").to_string();
        assert_eq!(error, format!("kv.append_to_slots: {text}"));
    };
    let mapping = |slots: &[i64; 3], text: &str| {
        refused(SlotArrays::Mapping { slot_mapping: slots.into(), page_size: 2 }, text);
    };
    mapping(&[0, 4, 1], "token 1: slot = 4 is not in 0..4, nor -1 to skip the token");
    mapping(&[0, 1, -2], "token 2: slot = -2 is not in 0..4, nor -1 to skip the token");
    mapping(&[3, -1, 3], "tokens 0 and 2 both go to slot 1 of page 1");
    let slot_mapping = (&[0; 2]).into();
    let axes = "expected [num_tokens, num_kv_heads, head_dim] = [2, 1, 1]";
    refused(SlotArrays::Mapping { slot_mapping, page_size: 2 }, &format!("k has shape [3, 1, 1], {axes}"));
    let paged = |positions: &[i32], indptr: &[i32], indices: &[i32], text: &str| {
        let batch_indices = (&[0, 0, 1]).into();
        let (positions, indptr, indices) = (positions.into(), indptr.into(), indices.into());
        refused(SlotArrays::Paged { batch_indices, positions, indptr, indices, page_size: 2 }, text);
    };
    paged(&[0, 2, 0], &[0, 1, 2], &[0, 1], "token 1: position = 2 is not in 0..2 of request 0");
    paged(&[0, 1], &[0, 1, 2], &[0, 1], "positions has shape [2], expected [num_tokens] = [3]");
    paged(&[0, 1, 0], &[0, 1, 2], &[0, 2], "page = 2 is not in 0..2, the pages of the cache");
    paged(&[0, 1, 0], &[], &[], "kv indptr has 0 entries, expected num_requests + 1");
}

#[test]
fn new_tokens_are_at_the_end_of_their_requests() {
    let (requests, positions) =
        get_batch_indices_positions(&[0_i32, 2, 2, 5], &[2, 9, 7]).expect("the lengths are sound");
    assert_eq!(requests, [0, 0, 2, 2, 2]);
    assert_eq!(positions, [0, 1, 4, 5, 6]);
    let none = get_batch_indices_positions(&[0_i64], &[]).expect("no request at all");
    assert_eq!(none, (vec![], vec![]));
}

#[test]
fn lengths_follow_from_pages_and_the_last_page() {
    let lens = |table: &PageTable<'_>| get_seq_lens(table).expect("the table is sound");
    let table = PageTable::new(&[0, 1, 1, 4, 6], &[7, 3, 2, 9, 0, 1], &[16, 0, 1, 15], 16);
    assert_eq!(lens(&table), [16, 0, 33, 31]);
    let wide = PageTable::new(&[0_i64, 1, 1, 4, 6], &[7_i64, 3, 2, 9, 0, 1], &[16_i64, 0, 1, 15], 16);
    assert_eq!(lens(&wide), [16, 0, 33, 31]);
    assert_eq!(lens(&PageTable::new(&[0], &[0_i32; 0], &[0_i32; 0], 1)), [0_usize; 0]);
}

crate::judge_backends!(
    appended_tokens_are_in_their_slots_and_nothing_else_is_touched,
    a_cache_with_gaps_takes_tokens_and_keeps_its_gaps,
    padding_is_skipped,
    slot_arrays_give_the_slots_of_tokens
);
