//! Appends tokens to the two caches of multi-head latent attention (DeepSeek-V2 MLA): one latent and one rotary row per
//! token, shared by all heads.

use crate::{
    Backend, Operator, Result, View, ViewMut, check_shape,
    kv::{
        AppendSlots, PageTable, Scale, ScaleMut, SlotArrays, Slots,
        append::{KvAppend, check_positions},
        layout::KvStrides,
        slots::TokenSlots,
    },
};

const OPERATOR: &str = "kv.append_paged_mla_kv_cache";

/// New tokens of any dtype, and their requests and positions.
#[derive(Debug, Clone, Copy)]
pub struct NewMlaTokens<'a> {
    /// `[num_tokens, ckv_dim]`: compressed keys and values (512 in DeepSeek's models).
    pub ckv: View<'a>,
    /// `[num_tokens, kpe_dim]`: keys with their positions (64 in DeepSeek's models).
    pub kpe: View<'a>,
    /// `[num_tokens]`: the request of each token; -1 skips the token and ignores its position.
    pub batch_indices: &'a [i32],
    /// `[num_tokens]`: the position of each token in its request.
    pub positions: &'a [i32],
}

/// New rows of any dtype.
#[derive(Debug, Clone, Copy)]
pub struct NewMla<'a> {
    /// `[num_tokens, ckv_dim]`
    pub ckv: View<'a>,
    /// `[num_tokens, kpe_dim]`
    pub kpe: View<'a>,
}

/// The two caches to write to; their dtypes may differ.
#[derive(Debug)]
pub struct MlaCacheMut<'a> {
    /// `[num_pages, page_size, ckv_dim]`
    pub ckv: ViewMut<'a>,
    /// `[num_pages, page_size, kpe_dim]`
    pub kpe: ViewMut<'a>,
}

/// Writes each token of `new` to its slot in both caches, rounded to nearest even.
///
/// # Errors
/// When shapes disagree, a last axis has not stride 1, the table is malformed, a token's request, position or page does
/// not exist, or two tokens map to one slot. Nothing is written then.
pub fn append_paged_mla_kv_cache<B: Backend>(
    backend: &B,
    new: &NewMlaTokens<'_>,
    cache: MlaCacheMut<'_>,
    table: &PageTable<'_>,
) -> Result<()> {
    let (tokens, page_size) = (new.batch_indices.len(), table.page_size);
    let new_rows = NewMla { ckv: new.ckv, kpe: new.kpe };
    let rows = MlaAppend { operator: OPERATOR, new: new_rows, tokens, page_size };
    let num_pages = rows.check(&cache)?;
    check_positions(OPERATOR, new.positions.len(), tokens)?;
    let token_slots =
        TokenSlots::look_up(OPERATOR, table, new.batch_indices, new.positions, Some(num_pages))?;
    rows.append(backend, cache, AppendSlots::Checked(Slots::new(&token_slots)))
}

/// [`append_paged_mla_kv_cache`] to the slots of arrays in host or device memory.
///
/// # Errors
/// As [`append_paged_mla_kv_cache`] for arrays on the host. Values of arrays on a device are not read here; their meaning
/// is that of [`SlotArrays`].
pub fn append_mla_to_slots<B: Backend>(
    backend: &B,
    new: NewMla<'_>,
    cache: MlaCacheMut<'_>,
    arrays: &SlotArrays<'_>,
) -> Result<()> {
    let operator = "kv.append_mla_to_slots";
    let rows = MlaAppend { operator, new, tokens: arrays.tokens(), page_size: arrays.page_size() };
    let num_pages = rows.check(&cache)?;
    let looked_up = arrays.look_up(operator, num_pages)?;
    rows.append(backend, cache, arrays.slots(looked_up.as_ref(), num_pages))
}

/// An append to both caches.
struct MlaAppend<'a> {
    operator: &'static str,
    new: NewMla<'a>,
    /// Number of new tokens.
    tokens: usize,
    page_size: usize,
}

impl<'a> MlaAppend<'a> {
    /// Checks both against their caches. Returns the number of pages that both have.
    fn check(&self, cache: &MlaCacheMut<'_>) -> Result<usize> {
        let ckv_pages = self.check_part("ckv", &self.new.ckv, &cache.ckv.as_view())?;
        Ok(ckv_pages.min(self.check_part("kpe", &self.new.kpe, &cache.kpe.as_view())?))
    }

    /// Checks new rows against their cache, and returns its number of pages.
    fn check_part(&self, name: &str, new: &View<'_>, cache: &View<'_>) -> Result<usize> {
        let Self { operator, tokens, page_size, .. } = *self;
        let dim = new.shape().get(1).copied().unwrap_or(0);
        check_shape(operator, name, new.shape(), &[tokens, dim], "[num_tokens, dim]")?;
        let num_pages = cache.shape().first().copied().unwrap_or(0);
        let axes = "[num_pages, page_size, dim]";
        check_shape(operator, &format!("cache {name}"), cache.shape(), &[num_pages, page_size, dim], axes)?;
        for (name, strides) in [(name.to_owned(), new.strides()), (format!("cache {name}"), cache.strides())]
        {
            crate::ensure!(
                strides.last() == Some(&1) || dim == 1,
                operator,
                "{name} has strides {strides:?}: dim, the last axis, must have stride 1"
            );
        }
        Ok(num_pages)
    }

    fn append<'s, B: Backend>(
        &self,
        backend: &B,
        cache: MlaCacheMut<'s>,
        slots: AppendSlots<'s>,
    ) -> Result<()>
    where
        'a: 's,
    {
        let names = [["ckv", "cache ckv", "ckv scale"], ["kpe", "cache kpe", "kpe scale"]];
        for ((rows, cache), names) in
            [(self.new.ckv, cache.ckv), (self.new.kpe, cache.kpe)].into_iter().zip(names)
        {
            let strides = KvStrides { page: cache.strides()[0], token: cache.strides()[1], head: 0 };
            let (new, scale) = (rows.with_single_head(), ScaleMut::Static(Scale::One));
            KvAppend { new, cache, strides, slots, scale, operator: self.operator, names }.run(backend)?;
        }
        Ok(())
    }
}
