//! Puts new keys and values into the pages that a page table assigns to them.

use crate::{
    Backend, Result, View,
    attention::Index,
    kv::{
        KvCacheMut, KvLayout, PageTable,
        layout::{KvShape, KvStrides},
    },
    tensor::check_shape,
};

const OPERATOR: &str = "kv.append_paged_kv_cache";

/// New tokens, of any dtype, and where they go.
#[derive(Debug, Clone, Copy)]
pub struct Append<'a> {
    /// `[num_tokens, num_kv_heads, head_dim_qk]`
    pub k: View<'a>,
    /// `[num_tokens, num_kv_heads, head_dim_vo]`
    pub v: View<'a>,
    /// `[num_tokens]`: the request of each token.
    pub batch_indices: &'a [i32],
    /// `[num_tokens]`: the position of each token in its request.
    pub positions: &'a [i32],
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

/// Writes each token of `new` into its slot of `cache`. A later token wins where two name one slot.
///
/// `cache` is `[num_pages, page_size, num_kv_heads, head_dim]` (NHD) or
/// `[num_pages, num_kv_heads, page_size, head_dim]` (HND); K and V may differ in head_dim. Values are rounded to the
/// cache's dtype, to nearest even.
///
/// # Errors
/// When shapes disagree, the table is malformed, or a token's request, position or page does not
/// exist. Nothing was written then.
pub fn append_paged_kv_cache<B: Backend>(
    backend: &B,
    new: &Append<'_>,
    mut cache: KvCacheMut<'_>,
    layout: KvLayout,
    table: &PageTable<'_>,
) -> Result<()> {
    let slots = check(new, &cache, layout, table)?;
    let k = KvStrides::of(layout, cache.k.strides());
    let v = KvStrides::of(layout, cache.v.strides());
    backend.append(new.k, cache.k.reborrow(), &Slots { of_token: &slots, strides: k })?;
    backend.append(new.v, cache.v.reborrow(), &Slots { of_token: &slots, strides: v })
}

/// Where each token of one tensor goes.
#[derive(Debug, Clone, Copy)]
pub struct Slots<'a> {
    of_token: &'a [(usize, usize)],
    strides: KvStrides,
}

impl Slots<'_> {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.of_token.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.of_token.is_empty()
    }

    /// Offset of `head` of `token` in the cache, in elements.
    pub fn offset(&self, token: usize, head: usize) -> usize {
        let (page, slot) = self.of_token[token];
        page * self.strides.page + slot * self.strides.token + head * self.strides.head
    }
}

/// Checks everything, and gives each token's (page, slot in the page).
fn check(
    new: &Append<'_>,
    cache: &KvCacheMut<'_>,
    layout: KvLayout,
    table: &PageTable<'_>,
) -> Result<Vec<(usize, usize)>> {
    let tokens = new.batch_indices.len();
    let heads = new.k.shape().get(1).copied().unwrap_or(0);
    let mut num_pages = usize::MAX;
    for (name, new, cache) in [("k", new.k, cache.k.as_view()), ("v", new.v, cache.v.as_view())] {
        let head_dim = new.shape().get(2).copied().unwrap_or(0);
        let expected = [tokens, heads, head_dim];
        check_shape(OPERATOR, name, (new.shape(), &expected), "[num_tokens, num_kv_heads, head_dim]")?;
        crate::ensure!(
            new.strides()[2] == 1 || head_dim == 1,
            OPERATOR,
            "{name} has strides {:?}: head_dim, the last axis, must have stride 1",
            new.strides()
        );
        let dtype = cache.dtype();
        let shape = KvShape { layout, page_size: Some(table.page_size), heads, head_dim, dtype };
        let cache = (cache.shape(), cache.strides(), dtype);
        num_pages = num_pages.min(shape.check(OPERATOR, &format!("cache {name}"), cache)?);
    }
    check_shape(OPERATOR, "positions", (&[new.positions.len()], &[tokens]), "[num_tokens]")?;
    let pages = table.resolve(OPERATOR)?;
    crate::ensure!(
        pages.max_page < 0 || (pages.max_page as usize) < num_pages,
        OPERATOR,
        "page = {} is not in 0..{num_pages}, the pages of the cache",
        pages.max_page
    );
    let locate = |token: usize| {
        let (request, position) = (new.batch_indices[token], new.positions[token]);
        let range = usize::try_from(request).ok().and_then(|r| pages.ranges.get(r).map(|range| (r, range)));
        let Some((r, range)) = range else {
            let count = pages.ranges.len();
            let text = format!("token {token}: batch_index = {request} is not in 0..{count}");
            return Err(crate::Error::new(OPERATOR, text));
        };
        let kv_len = pages.kv_lens[r];
        let at = usize::try_from(position).ok().filter(|&at| at < kv_len);
        let Some(at) = at else {
            let text =
                format!("token {token}: position = {position} is not in 0..{kv_len} of request {request}");
            return Err(crate::Error::new(OPERATOR, text));
        };
        Ok((pages.indices[range.start + at / table.page_size] as usize, at % table.page_size))
    };
    (0..tokens).map(locate).collect()
}
