//! Appends new keys and values to a paged KV cache, quantizing where the cache has scales.

use crate::{
    Backend, Result, View,
    attention::Index,
    kv::{
        AppendPlan, KvCacheMut, KvLayout, PageTable, Scale, ScaleMut, Slots,
        layout::{KvShape, KvStrides},
        slots::TokenSlots,
    },
    tensor::check_shape,
};

/// New tokens of any dtype, and their requests and positions.
#[derive(Debug, Clone, Copy)]
pub struct NewTokens<'a> {
    /// `[num_tokens, num_kv_heads, head_dim_qk]`
    pub k: View<'a>,
    /// `[num_tokens, num_kv_heads, head_dim_vo]`
    pub v: View<'a>,
    /// `[num_tokens]`: the request of each token; -1 skips the token and ignores its position.
    pub batch_indices: &'a [i32],
    /// `[num_tokens]`: the position of each token in its request.
    pub positions: &'a [i32],
}

/// A cache to write to, and its scales.
#[derive(Debug)]
pub struct QuantizedCacheMut<'a> {
    /// K and V, paged, of any dtype.
    pub cache: KvCacheMut<'a>,
    /// Scale of keys.
    pub k_scale: ScaleMut<'a>,
    /// Scale of values.
    pub v_scale: ScaleMut<'a>,
}

/// The request and position of each of the ragged new tokens at the end of their requests.
///
/// Request `r` appends `append_indptr[r]..append_indptr[r + 1]`; its last new token has position `seq_lens[r] - 1`:
/// `seq_lens` includes the new tokens.
///
/// # Errors
/// When `append_indptr` decreases or has not one entry more than `seq_lens`, a length does not fit in 32 bits, or a
/// request appends more tokens than its `seq_lens`.
pub fn get_batch_indices_positions<'a>(
    append_indptr: impl Into<Index<'a>>,
    seq_lens: &[usize],
) -> Result<(Vec<i32>, Vec<i32>)> {
    const OPERATOR: &str = "kv.get_batch_indices_positions";
    let ranges = append_indptr.into().ranges(OPERATOR, "append_indptr", seq_lens.len())?;
    let (mut requests, mut positions) = (Vec::new(), Vec::new());
    for (request, (range, &len)) in ranges.iter().zip(seq_lens).enumerate() {
        crate::ensure!(
            i32::try_from(len).is_ok(),
            OPERATOR,
            "request {request}: seq_len = {len} does not fit in 32 bits"
        );
        crate::ensure!(
            range.len() <= len,
            OPERATOR,
            "request {request}: appends {} tokens, but seq_len = {len}",
            range.len()
        );
        for position in len - range.len()..len {
            requests.push(request as i32);
            positions.push(position as i32);
        }
    }
    Ok((requests, positions))
}

/// Writes each token of `new` to its slot in `cache`.
///
/// `cache` is `[num_pages, page_size, num_kv_heads, head_dim]` (NHD) or `[num_pages, num_kv_heads, page_size,
/// head_dim]` (HND); K and V may differ in head_dim. Values are rounded to the cache's dtype, to nearest even (see
/// [`crate::Element`]).
///
/// # Errors
/// When shapes disagree, the table is malformed, a token's request, position or page does not exist, or two tokens map
/// to one slot. Nothing is written then.
pub fn append_paged_kv_cache<B: Backend>(
    backend: &B,
    new: &NewTokens<'_>,
    cache: KvCacheMut<'_>,
    layout: KvLayout,
    table: &PageTable<'_>,
) -> Result<()> {
    let scale = || ScaleMut::Static(Scale::One);
    let cache = QuantizedCacheMut { cache, k_scale: scale(), v_scale: scale() };
    append("kv.append_paged_kv_cache", backend, new, cache, (layout, table))
}

/// [`append_paged_kv_cache`] to a quantized cache: `stored = value / scale`, divided in f32, rounded to the cache's
/// dtype, to nearest even, and saturated.
///
/// [`ScaleMut::Dynamic`] computes the scales from the contents of the pages.
///
/// # Errors
/// As [`append_paged_kv_cache`], and when scales do not fit the cache, or a scale in use is not finite or not above 0.
/// Nothing is written then.
/// 0. Nothing was written then.
pub fn append_paged_kv_cache_quantized<B: Backend>(
    backend: &B,
    new: &NewTokens<'_>,
    cache: QuantizedCacheMut<'_>,
    layout: KvLayout,
    table: &PageTable<'_>,
) -> Result<()> {
    append("kv.append_paged_kv_cache_quantized", backend, new, cache, (layout, table))
}

/// [`append_paged_kv_cache_quantized`] with slots looked up once per step, for all layers.
///
/// `new`: k `[num_tokens, num_kv_heads, head_dim_qk]` and v `[num_tokens, num_kv_heads, head_dim_vo]`, of any dtype,
/// with the plan's number of tokens.
///
/// # Errors
/// When shapes or scales do not fit the plan or the cache, or the cache lacks a page of the plan's table. Nothing is
/// written then.
pub fn append_planned<B: Backend>(
    backend: &B,
    plan: &AppendPlan,
    new: (View<'_>, View<'_>),
    cache: QuantizedCacheMut<'_>,
    layout: KvLayout,
) -> Result<()> {
    const OPERATOR: &str = "kv.append_planned";
    let params =
        AppendParams { operator: OPERATOR, new, tokens: plan.tokens(), page_size: plan.page_size(), layout };
    let num_pages = params.check(&cache.cache)?;
    plan.token_slots().check_pages(OPERATOR, num_pages[0].min(num_pages[1]))?;
    params.run(backend, cache, num_pages, Slots::of_plan(plan))
}

fn append<B: Backend>(
    operator: &'static str,
    backend: &B,
    new: &NewTokens<'_>,
    target: QuantizedCacheMut<'_>,
    (layout, table): (KvLayout, &PageTable<'_>),
) -> Result<()> {
    let (tokens, page_size) = (new.batch_indices.len(), table.page_size);
    let params = AppendParams { operator, new: (new.k, new.v), tokens, page_size, layout };
    let num_pages = params.check(&target.cache)?;
    check_positions(operator, new.positions, tokens)?;
    let tokens = (new.batch_indices, new.positions);
    let token_slots = TokenSlots::look_up(operator, table, tokens, Some(num_pages[0].min(num_pages[1])))?;
    params.run(backend, target, num_pages, |strides| Slots::new(&token_slots, strides))
}

/// Parameters shared by planned and unplanned appends.
struct AppendParams<'a> {
    operator: &'static str,
    new: (View<'a>, View<'a>),
    tokens: usize,
    page_size: usize,
    layout: KvLayout,
}

impl AppendParams<'_> {
    /// Checks new tokens against the cache. Returns the number of pages of K and of V.
    fn check(&self, cache: &KvCacheMut<'_>) -> Result<[usize; 2]> {
        let (operator, layout) = (self.operator, self.layout);
        let heads = self.new.0.shape().get(1).copied().unwrap_or(0);
        let mut num_pages = [0; 2];
        let tensors = [("k", self.new.0, cache.k.as_view()), ("v", self.new.1, cache.v.as_view())];
        for (pages, (name, new_tokens, cache)) in num_pages.iter_mut().zip(tensors) {
            let shape = [self.tokens, heads, new_tokens.shape().get(2).copied().unwrap_or(0)];
            check_shape(
                operator,
                name,
                (new_tokens.shape(), &shape),
                "[num_tokens, num_kv_heads, head_dim]",
            )?;
            crate::ensure!(
                new_tokens.strides()[2] == 1 || shape[2] == 1,
                operator,
                "{name} has strides {:?}: head_dim, the last axis, must have stride 1",
                new_tokens.strides()
            );
            let (head_dim, dtype) = (shape[2], cache.dtype());
            let expected = KvShape { layout, page_size: Some(self.page_size), heads, head_dim, dtype };
            let cache = (cache.shape(), cache.strides(), dtype);
            *pages = expected.check(operator, &format!("cache {name}"), cache)?;
        }
        Ok(num_pages)
    }

    /// Checks the scales and calls the backend.
    fn run<'s, B: Backend>(
        &self,
        backend: &B,
        target: QuantizedCacheMut<'_>,
        num_pages: [usize; 2],
        slots: impl Fn(KvStrides) -> Slots<'s>,
    ) -> Result<()> {
        let (k, v) = self.new;
        let heads = k.shape()[1];
        let tensors =
            [("k scale", k, target.cache.k, target.k_scale), ("v scale", v, target.cache.v, target.v_scale)];
        let slots =
            tensors.each_ref().map(|(.., cache, _)| slots(KvStrides::of(self.layout, cache.strides())));
        for ((name, _, cache, scale), (slots, num_pages)) in tensors.iter().zip(slots.iter().zip(num_pages)) {
            let pages = slots.pages().map(|page| page.page);
            scale.check(self.operator, name, (cache.dtype(), [num_pages, heads]), pages)?;
        }
        for ((_, new, cache, scale), slots) in tensors.into_iter().zip(slots) {
            backend.append(new, cache, &slots, scale)?;
        }
        Ok(())
    }
}

/// Checks that there are as many positions as tokens.
pub(super) fn check_positions(operator: &'static str, positions: &[i32], tokens: usize) -> Result<()> {
    check_shape(operator, "positions", (&[positions.len()], &[tokens]), "[num_tokens]")
}
