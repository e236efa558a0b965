//! Appends tokens to the two caches of multi-head latent attention (DeepSeek-V2 MLA): one latent and one rotary row per
//! token, shared by all heads.

use crate::{
    Backend, Operator, Result, View, ViewMut,
    kv::{
        PageTable, Scale, ScaleMut, Slots,
        append::{KvAppend, check_positions},
        layout::KvStrides,
        slots::TokenSlots,
    },
    tensor::check_shape,
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
    let tokens = new.batch_indices.len();
    let ckv_pages = check("ckv", &new.ckv, tokens, &cache.ckv.as_view(), table.page_size)?;
    let kpe_pages = check("kpe", &new.kpe, tokens, &cache.kpe.as_view(), table.page_size)?;
    check_positions(OPERATOR, new.positions, tokens)?;
    let num_pages = ckv_pages.min(kpe_pages);
    let token_slots =
        TokenSlots::look_up(OPERATOR, table, new.batch_indices, new.positions, Some(num_pages))?;
    let names = [["ckv", "cache ckv", "ckv scale"], ["kpe", "cache kpe", "kpe scale"]];
    for ((rows, cache), names) in [(new.ckv, cache.ckv), (new.kpe, cache.kpe)].into_iter().zip(names) {
        let strides = KvStrides { page: cache.strides()[0], token: cache.strides()[1], head: 0 };
        let (new, slots) = (rows.with_single_head(), Slots::new(&token_slots, strides));
        let scale = ScaleMut::Static(Scale::One);
        KvAppend { new, cache, slots, scale, operator: OPERATOR, names }.run(backend)?;
    }
    Ok(())
}

/// Checks new rows against their cache, and returns its number of pages.
fn check(name: &str, new: &View<'_>, tokens: usize, cache: &View<'_>, page_size: usize) -> Result<usize> {
    let dim = new.shape().get(1).copied().unwrap_or(0);
    check_shape(OPERATOR, name, (new.shape(), &[tokens, dim]), "[num_tokens, dim]")?;
    let num_pages = cache.shape().first().copied().unwrap_or(0);
    let axes = "[num_pages, page_size, dim]";
    check_shape(OPERATOR, &format!("cache {name}"), (cache.shape(), &[num_pages, page_size, dim]), axes)?;
    for (name, strides) in [(name.to_owned(), new.strides()), (format!("cache {name}"), cache.strides())] {
        crate::ensure!(
            strides.last() == Some(&1) || dim == 1,
            OPERATOR,
            "{name} has strides {strides:?}: dim, the last axis, must have stride 1"
        );
    }
    Ok(num_pages)
}
