//! Puts new keys and values into the pages that a page table assigns to them, quantising where the cache has scales.

use crate::{
    Backend, Result, View,
    attention::Index,
    kv::{
        KvCacheMut, KvLayout, PageTable, Scale, ScaleMut, Slots,
        layout::{KvShape, KvStrides},
        slots::Places,
    },
    tensor::check_shape,
};

/// New tokens, of any dtype, and where they go.
#[derive(Debug, Clone, Copy)]
pub struct Append<'a> {
    /// `[num_tokens, num_kv_heads, head_dim_qk]`
    pub k: View<'a>,
    /// `[num_tokens, num_kv_heads, head_dim_vo]`
    pub v: View<'a>,
    /// `[num_tokens]`: the request of each token; -1 skips the token, whatever its position.
    pub batch_indices: &'a [i32],
    /// `[num_tokens]`: the position of each token in its request.
    pub positions: &'a [i32],
}

/// A cache to write into, and the scales of its K and V.
#[derive(Debug)]
pub struct QuantizedCacheMut<'a> {
    /// K and V, paged, of any dtype.
    pub cache: KvCacheMut<'a>,
    /// Of keys.
    pub k_scale: ScaleMut<'a>,
    /// Of values.
    pub v_scale: ScaleMut<'a>,
}

/// For ragged new tokens at the end of their requests: the request and the position of each.
///
/// Request `r` appends `append_indptr[r]..append_indptr[r + 1]`; its last new token stands at `seq_lens[r] - 1`,
/// so `seq_lens` counts the new tokens already.
///
/// # Errors
/// When `append_indptr` decreases, does not have one entry more than `seq_lens`, a length does not fit in 32 bits, or
/// a request appends more tokens than `seq_lens` says it has.
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

/// Writes each token of `new` into its slot of `cache`.
///
/// `cache` is `[num_pages, page_size, num_kv_heads, head_dim]` (NHD) or
/// `[num_pages, num_kv_heads, page_size, head_dim]` (HND); K and V may differ in head_dim. Values are rounded to the
/// cache's dtype, to nearest even, as [`crate::Element`] says.
///
/// # Errors
/// When shapes disagree, the table is malformed, a token's request, position or page does not exist, or two tokens go
/// to one slot. Nothing was written then.
pub fn append_paged_kv_cache<B: Backend>(
    backend: &B,
    new: &Append<'_>,
    cache: KvCacheMut<'_>,
    layout: KvLayout,
    table: &PageTable<'_>,
) -> Result<()> {
    let scale = || ScaleMut::Given(Scale::One);
    let cache = QuantizedCacheMut { cache, k_scale: scale(), v_scale: scale() };
    append("kv.append_paged_kv_cache", backend, new, cache, (layout, table))
}

/// [`append_paged_kv_cache`] into a cache with scales: `stored = value / scale`, divided in f32, then rounded to the
/// cache's dtype, to nearest even. Values beyond what the dtype holds become its largest.
///
/// With [`ScaleMut::Dynamic`] the scales of the pages are chosen here, from what is in them.
///
/// # Errors
/// As [`append_paged_kv_cache`]; and when scales do not fit the cache, or one that is needed is not finite or not above
/// 0. Nothing was written then.
pub fn append_paged_kv_cache_quantized<B: Backend>(
    backend: &B,
    new: &Append<'_>,
    cache: QuantizedCacheMut<'_>,
    layout: KvLayout,
    table: &PageTable<'_>,
) -> Result<()> {
    append("kv.append_paged_kv_cache_quantized", backend, new, cache, (layout, table))
}

fn append<B: Backend>(
    operator: &'static str,
    backend: &B,
    new: &Append<'_>,
    mut target: QuantizedCacheMut<'_>,
    (layout, table): (KvLayout, &PageTable<'_>),
) -> Result<()> {
    let cache = &mut target.cache;
    let heads = new.k.shape().get(1).copied().unwrap_or(0);
    let mut num_pages = [0; 2];
    let tensors = [("k", new.k, cache.k.as_view()), ("v", new.v, cache.v.as_view())];
    for (pages, (name, new_tokens, cache)) in num_pages.iter_mut().zip(tensors) {
        let shape = [new.batch_indices.len(), heads, new_tokens.shape().get(2).copied().unwrap_or(0)];
        check_shape(operator, name, (new_tokens.shape(), &shape), "[num_tokens, num_kv_heads, head_dim]")?;
        crate::ensure!(
            new_tokens.strides()[2] == 1 || shape[2] == 1,
            operator,
            "{name} has strides {:?}: head_dim, the last axis, must have stride 1",
            new_tokens.strides()
        );
        let (head_dim, dtype) = (shape[2], cache.dtype());
        let expected = KvShape { layout, page_size: Some(table.page_size), heads, head_dim, dtype };
        let cache = (cache.shape(), cache.strides(), dtype);
        *pages = expected.check(operator, &format!("cache {name}"), cache)?;
    }
    check_positions(operator, new.positions, new.batch_indices.len())?;
    let tokens = (new.batch_indices, new.positions);
    let places = Places::find(operator, table, tokens, num_pages[0].min(num_pages[1]))?;
    let k_cache = (cache.k.dtype(), [num_pages[0], heads]);
    target.k_scale.check(operator, "k scale", k_cache, places.pages())?;
    let v_cache = (cache.v.dtype(), [num_pages[1], heads]);
    target.v_scale.check(operator, "v scale", v_cache, places.pages())?;

    let k = Slots::new(&places, KvStrides::of(layout, cache.k.strides()));
    backend.append(new.k, cache.k.reborrow(), &k, target.k_scale)?;
    let v = Slots::new(&places, KvStrides::of(layout, cache.v.strides()));
    backend.append(new.v, cache.v.reborrow(), &v, target.v_scale)
}

/// Refuses another number of positions than of tokens.
pub(super) fn check_positions(operator: &'static str, positions: &[i32], tokens: usize) -> Result<()> {
    check_shape(operator, "positions", (&[positions.len()], &[tokens]), "[num_tokens]")
}
