//! Appends new keys and values to a paged KV cache, quantizing where the cache has scales.

use crate::{
    Backend, Operator, Result, TensorRef, TensorVisitor, View, ViewMut,
    attention::Index,
    check_shape, dispatch,
    kv::{
        AppendPlan, AppendSlots, KvCacheMut, KvLayout, PageTable, Scale, ScaleMut, SlotArrays, Slots,
        layout::{KvShape, KvStrides},
        scales::check_page_shape,
        slots::TokenSlots,
    },
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

/// New keys and values of any dtype.
#[derive(Debug, Clone, Copy)]
pub struct NewKv<'a> {
    /// `[num_tokens, num_kv_heads, head_dim_qk]`
    pub k: View<'a>,
    /// `[num_tokens, num_kv_heads, head_dim_vo]`
    pub v: View<'a>,
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

/// Maximum tokens of a list of requests and positions: bounds its memory to 2 GiB.
const MAX_TOKENS: usize = 1 << 28;

/// The request and position of each of the ragged new tokens at the end of their requests.
///
/// Request `r` appends `append_indptr[r]..append_indptr[r + 1]`; its last new token has position `seq_lens[r] - 1`:
/// `seq_lens` includes the new tokens.
///
/// # Errors
/// When `append_indptr` decreases or has not one entry more than `seq_lens`, a length does not fit in 32 bits, a request
/// appends more tokens than its `seq_lens`, or there are more than 2²⁸ tokens.
pub fn get_batch_indices_positions<'a>(
    append_indptr: impl Into<Index<'a>>,
    seq_lens: &[usize],
) -> Result<(Vec<i32>, Vec<i32>)> {
    const OPERATOR: &str = "kv.get_batch_indices_positions";
    let ranges = append_indptr.into().ranges(OPERATOR, "append_indptr", seq_lens.len())?;
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
    }
    let tokens = ranges.last().map_or(0, |range| range.end);
    crate::ensure!(
        tokens <= MAX_TOKENS,
        OPERATOR,
        "append_indptr ends at {tokens}, the most is {MAX_TOKENS} tokens"
    );
    let (mut requests, mut positions) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens));
    for (request, (range, &len)) in ranges.iter().zip(seq_lens).enumerate() {
        requests.resize(range.end, request as i32);
        positions.extend((len - range.len()..len).map(|position| position as i32));
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
    AppendParams::of("kv.append_paged_kv_cache", new, layout, table).append(backend, new, cache, table)
}

/// [`append_paged_kv_cache`] to a quantized cache: `stored = value / scale`, divided in f32, rounded to the cache's
/// dtype, to nearest even, and saturated.
///
/// [`ScaleMut::Dynamic`] computes the scales from the contents of the pages.
///
/// # Errors
/// As [`append_paged_kv_cache`], and when scales do not fit the cache, or a scale in use is not finite or not above 0.
/// Nothing is written then.
pub fn append_paged_kv_cache_quantized<B: Backend>(
    backend: &B,
    new: &NewTokens<'_>,
    cache: QuantizedCacheMut<'_>,
    layout: KvLayout,
    table: &PageTable<'_>,
) -> Result<()> {
    AppendParams::of("kv.append_paged_kv_cache_quantized", new, layout, table)
        .append(backend, new, cache, table)
}

/// [`append_paged_kv_cache_quantized`] with slots looked up once per step, for all layers.
///
/// `new` has the plan's number of tokens.
///
/// # Errors
/// When shapes or scales do not fit the plan or the cache, or the cache lacks a page of the plan's table. Nothing is
/// written then.
pub fn append_planned<B: Backend + ?Sized>(
    backend: &B,
    plan: &AppendPlan,
    new: NewKv<'_>,
    cache: QuantizedCacheMut<'_>,
    layout: KvLayout,
) -> Result<()> {
    const OPERATOR: &str = "kv.append_planned";
    check_planned(OPERATOR, plan, new, &cache.cache, layout)?;
    AppendParams::of_plan(OPERATOR, plan, new, layout).run(
        backend,
        cache,
        AppendSlots::Checked(Slots::of_plan(plan)),
    )
}

/// Checks new tokens against a plan and the cache.
pub(super) fn check_planned(
    operator: &'static str,
    plan: &AppendPlan,
    new: NewKv<'_>,
    cache: &KvCacheMut<'_>,
    layout: KvLayout,
) -> Result<()> {
    let num_pages = AppendParams::of_plan(operator, plan, new, layout).check(cache)?;
    plan.token_slots().check_pages(operator, num_pages)
}

/// [`append_paged_kv_cache_quantized`] to the slots of arrays in host or device memory; scales are static.
///
/// # Errors
/// As [`append_paged_kv_cache_quantized`] for arrays on the host. Values of arrays on a device are not read here; their
/// meaning is that of [`SlotArrays`].
pub fn append_to_slots<B: Backend>(
    backend: &B,
    new: NewKv<'_>,
    cache: QuantizedCacheMut<'_>,
    layout: KvLayout,
    arrays: &SlotArrays<'_>,
) -> Result<()> {
    const OPERATOR: &str = "kv.append_to_slots";
    let (tokens, page_size) = (arrays.tokens(), arrays.page_size());
    let params = AppendParams { operator: OPERATOR, new, tokens, page_size, layout };
    let num_pages = params.check(&cache.cache)?;
    for (name, scale) in [("k scale", &cache.k_scale), ("v scale", &cache.v_scale)] {
        let is_static = matches!(scale, ScaleMut::Static(_));
        crate::ensure!(is_static, OPERATOR, "{name} is dynamic, expected a static scale with slot arrays");
    }
    let looked_up = arrays.look_up(OPERATOR, num_pages)?;
    params.run(backend, cache, arrays.slots(looked_up.as_ref(), num_pages))
}

/// The arguments of an append of one tensor: K or V, or a tensor of latent attention.
#[derive(Debug)]
pub struct KvAppend<'a> {
    /// The new tokens: `[num_tokens, num_kv_heads, dim]` of any dtype.
    pub new: View<'a>,
    /// The cache: paged, of any dtype.
    pub cache: ViewMut<'a>,
    /// The strides of the cache.
    pub strides: KvStrides,
    /// The slots of the tokens in the cache.
    pub slots: AppendSlots<'a>,
    /// The scale of the cache.
    pub scale: ScaleMut<'a>,
    pub(super) operator: &'static str,
    pub(super) names: [&'static str; 3],
}

impl<'a> Operator<'a> for KvAppend<'a> {
    fn name(&self) -> &'static str {
        self.operator
    }

    /// Checks the scale, for the pages of the tokens only, and slot arrays that a device has copied to the host. The shapes were checked before the lookup of the slots.
    fn check(&self) -> Result<()> {
        let (operator, name, dtype) = (self.operator, self.names[2], self.cache.dtype());
        self.slots.check(operator)?;
        let (num_pages, heads) = (self.cache.shape()[0], self.new.shape()[1]);
        let mut pages = self.slots.checked().into_iter().flat_map(Slots::pages).map(|page| page.page);
        let scales = match &self.scale {
            ScaleMut::Static(scale) => {
                scale.check(operator, name, heads, Some(num_pages))?;
                return scale.check_pages(operator, name, pages);
            }
            ScaleMut::Dynamic(scales) => scales.as_view(),
        };
        crate::ensure!(
            dtype.is_cache_only(),
            operator,
            "{name} is dynamic, but the cache is {dtype}, expected e4m3, e5m2 or int8"
        );
        crate::ensure!(
            scales.shape().len() == 2,
            operator,
            "{name} has shape {:?}, expected [num_pages, num_kv_heads] = [{num_pages}, {heads}]",
            scales.shape()
        );
        check_page_shape(operator, name, &scales, [num_pages, heads])?;
        if scales.device().is_some() {
            return Ok(()); // reading them would synchronize with the device
        }
        pages.try_for_each(|page| {
            let invalid = (0..heads).map(|head| (head, scales.at(&[page, head])));
            let invalid = invalid.into_iter().find(|(_, scale)| !(scale.is_finite() && *scale >= 0.0));
            let Some((head, scale)) = invalid else { return Ok(()) };
            let text =
                format!("page {page}, head {head}: {name} = {scale}, expected a finite number, 0 if unused");
            Err(crate::Error::new(operator, text))
        })
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        let [new, cache, scale] = self.names;
        visit(new, TensorRef::Input(&mut self.new))?;
        visit(cache, TensorRef::Output(&mut self.cache))?;
        self.slots.views(visit)?;
        match &mut self.scale {
            ScaleMut::Static(Scale::Page(scales) | Scale::Values(scales)) => {
                visit(scale, TensorRef::Input(scales))
            }
            ScaleMut::Static(_) => Ok(()),
            ScaleMut::Dynamic(scales) => visit(scale, TensorRef::Output(scales)),
        }
    }

    /// Only the slots of the new tokens are written.
    fn num_bytes(&mut self) -> usize {
        let elements = self.new.shape().iter().product::<usize>();
        elements * (self.new.dtype().size() + self.cache.dtype().size())
    }

    dispatch!(append);
}

/// Parameters shared by planned and unplanned appends.
struct AppendParams<'a> {
    operator: &'static str,
    new: NewKv<'a>,
    tokens: usize,
    page_size: usize,
    layout: KvLayout,
}

impl<'a> AppendParams<'a> {
    fn of(operator: &'static str, new: &NewTokens<'a>, layout: KvLayout, table: &PageTable<'_>) -> Self {
        let (tokens, page_size) = (new.batch_indices.len(), table.page_size);
        Self { operator, new: NewKv { k: new.k, v: new.v }, tokens, page_size, layout }
    }

    fn of_plan(operator: &'static str, plan: &AppendPlan, new: NewKv<'a>, layout: KvLayout) -> Self {
        Self { operator, new, tokens: plan.tokens(), page_size: plan.page_size(), layout }
    }

    /// Checks new tokens against the cache. Returns the number of pages that both K and V have.
    fn check(&self, cache: &KvCacheMut<'_>) -> Result<usize> {
        let (operator, layout) = (self.operator, self.layout);
        let heads = self.new.k.shape().get(1).copied().unwrap_or(0);
        let mut num_pages = usize::MAX;
        let tensors = [("k", self.new.k, cache.k.as_view()), ("v", self.new.v, cache.v.as_view())];
        for (name, new_tokens, cache) in tensors {
            let shape = [self.tokens, heads, new_tokens.shape().get(2).copied().unwrap_or(0)];
            check_shape(operator, name, new_tokens.shape(), &shape, "[num_tokens, num_kv_heads, head_dim]")?;
            crate::ensure!(
                new_tokens.strides()[2] == 1 || shape[2] == 1,
                operator,
                "{name} has strides {:?}: head_dim, the last axis, must have stride 1",
                new_tokens.strides()
            );
            let (head_dim, dtype) = (shape[2], cache.dtype());
            let expected = KvShape { layout, page_size: Some(self.page_size), heads, head_dim, dtype };
            num_pages = num_pages.min(expected.check(operator, &format!("cache {name}"), &cache)?);
        }
        Ok(num_pages)
    }

    /// Looks up the slots of `new`, then runs.
    fn append<B: Backend>(
        &self,
        backend: &B,
        new: &NewTokens<'_>,
        cache: QuantizedCacheMut<'_>,
        table: &PageTable<'_>,
    ) -> Result<()> {
        let num_pages = self.check(&cache.cache)?;
        check_positions(self.operator, new.positions.len(), self.tokens)?;
        let token_slots =
            TokenSlots::look_up(self.operator, table, new.batch_indices, new.positions, Some(num_pages))?;
        self.run(backend, cache, AppendSlots::Checked(Slots::new(&token_slots)))
    }

    /// Checks the scales and calls the backend.
    fn run<'s, B: Backend + ?Sized>(
        &self,
        backend: &B,
        target: QuantizedCacheMut<'s>,
        slots: AppendSlots<'s>,
    ) -> Result<()>
    where
        'a: 's,
    {
        let one = |new, cache: ViewMut<'s>, scale, names| {
            let strides = KvStrides::of(self.layout, cache.strides());
            KvAppend { new, cache, strides, slots, scale, operator: self.operator, names }
        };
        let both = [
            one(self.new.k, target.cache.k, target.k_scale, ["k", "cache k", "k scale"]),
            one(self.new.v, target.cache.v, target.v_scale, ["v", "cache v", "v scale"]),
        ];
        both.iter().try_for_each(KvAppend::check)?; // both, before anything is written
        both.into_iter().try_for_each(|append| append.dispatch(backend))
    }
}

/// Checks that there are as many positions as tokens.
pub(super) fn check_positions(operator: &'static str, positions: usize, tokens: usize) -> Result<()> {
    check_shape(operator, "positions", &[positions], &[tokens], "[num_tokens]")
}
