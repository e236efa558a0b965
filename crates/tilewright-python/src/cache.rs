//! Appends to paged caches, and the positions of new tokens.

use crate::{
    AnyBackend, Integers, SlotFields, Slots, TensorArg, batch::PageArrays, check_distinct, check_separate,
    operator_functions, raised, spans_overlap,
};
use pyo3::prelude::*;
use tilewright::{
    Error, KvCacheMut, KvLayout, Result, Scale, View,
    kv::{
        ScaleMut,
        append::{
            NewKv, NewTokens, QuantizedCacheMut, append_paged_kv_cache_quantized, append_to_slots,
            get_batch_indices_positions,
        },
        get_seq_lens,
        mla::{MlaCacheMut, NewMla, NewMlaTokens, append_mla_to_slots, append_paged_mla_kv_cache},
    },
};

const OPERATOR: &str = "kv.append_paged_kv_cache";

/// New tokens and the cache that receives them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct AppendFields {
    pub(crate) k: TensorArg,
    pub(crate) v: TensorArg,
    pub(crate) k_cache: TensorArg,
    pub(crate) v_cache: TensorArg,
    pub(crate) slots: SlotFields,
    pub(crate) layout: String,
    pub(crate) k_scale: Option<f32>,
    pub(crate) v_scale: Option<f32>,
}

/// The tensors of one append, and the tokens' slots.
#[derive(Clone, Copy)]
struct Append<'a> {
    new: NewKv<'a>,
    slots: &'a Slots<'a>,
    layout: KvLayout,
    scales: [Option<f32>; 2],
}

impl Append<'_> {
    fn run(&self, backend: &AnyBackend, k_cache: &mut TensorArg, v_cache: &mut TensorArg) -> Result<()> {
        let scale = |scale: Option<f32>| ScaleMut::Static(scale.map_or(Scale::One, Scale::Tensor));
        let cache = QuantizedCacheMut {
            cache: KvCacheMut {
                k: k_cache.view_mut(OPERATOR, "k_cache")?,
                v: v_cache.view_mut(OPERATOR, "v_cache")?,
            },
            k_scale: scale(self.scales[0]),
            v_scale: scale(self.scales[1]),
        };
        let new = self.new;
        match self.slots {
            Slots::Table { batch_indices, positions, table } => {
                let new = NewTokens { k: new.k, v: new.v, batch_indices, positions };
                append_paged_kv_cache_quantized(backend, &new, cache, self.layout, table)
            }
            Slots::Arrays(arrays) => append_to_slots(backend, new, cache, self.layout, arrays),
        }
    }
}

impl AppendFields {
    pub(crate) fn run(self, backend: &AnyBackend) -> Result<()> {
        let Self { k, v, mut k_cache, mut v_cache, slots, .. } = self;
        let layout = match self.layout.as_str() {
            "NHD" => KvLayout::Nhd,
            "HND" => KvLayout::Hnd,
            other => {
                let text = format!("layout = {other:?}, expected \"NHD\" or \"HND\"");
                return Err(Error::new(OPERATOR, text));
            }
        };
        for new in [k.named("k"), v.named("v")] {
            check_separate(OPERATOR, k_cache.named("k_cache"), new)?;
            check_separate(OPERATOR, v_cache.named("v_cache"), new)?;
        }
        let new = NewKv { k: k.view(OPERATOR, "k")?, v: v.view(OPERATOR, "v")? };
        let mut copied = Default::default();
        let slots = &slots.slots(OPERATOR, &mut copied)?;
        let append = Append { new, slots, layout, scales: [self.k_scale, self.v_scale] };
        if !spans_overlap(&k_cache, &v_cache) {
            return append.run(backend, &mut k_cache, &mut v_cache);
        }
        // parts of one tensor: a writable slice of each at a time, with the other one empty
        check_distinct(OPERATOR, k_cache.named("k_cache"), v_cache.named("v_cache"))?;
        let (no_k, no_v) = (k.emptied(2), v.emptied(2));
        let keys = NewKv { v: no_v.view(OPERATOR, "v")?, ..append.new };
        Append { new: keys, ..append }.run(backend, &mut k_cache, &mut v_cache.emptied(3))?;
        let values = NewKv { k: no_k.view(OPERATOR, "k")?, ..append.new };
        Append { new: values, ..append }.run(backend, &mut k_cache.emptied(3), &mut v_cache)
    }
}

operator_functions! {
    /// Writes new keys and values to their pages.
    append_paged(AppendFields);
    /// Writes new latent tokens to their pages.
    append_paged_mla(MlaAppendFields);
}

/// New latent tokens and the caches that receive them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct MlaAppendFields {
    pub(crate) ckv: TensorArg,
    pub(crate) kpe: TensorArg,
    pub(crate) ckv_cache: TensorArg,
    pub(crate) kpe_cache: TensorArg,
    pub(crate) slots: SlotFields,
}

impl MlaAppendFields {
    pub(crate) fn run(self, backend: &AnyBackend) -> Result<()> {
        const OPERATOR: &str = "kv.append_paged_mla_kv_cache";
        let Self { ckv, kpe, mut ckv_cache, mut kpe_cache, slots } = self;
        let pairs = [
            (ckv_cache.named("ckv_cache"), ckv.named("ckv")),
            (kpe_cache.named("kpe_cache"), kpe.named("kpe")),
        ];
        pairs.into_iter().try_for_each(|(cache, new)| check_separate(OPERATOR, cache, new))?;
        check_separate(OPERATOR, ckv_cache.named("ckv_cache"), kpe_cache.named("kpe_cache"))?;
        let (ckv, kpe): (View<'_>, View<'_>) = (ckv.view(OPERATOR, "ckv")?, kpe.view(OPERATOR, "kpe")?);
        let cache = MlaCacheMut {
            ckv: ckv_cache.view_mut(OPERATOR, "ckv_cache")?,
            kpe: kpe_cache.view_mut(OPERATOR, "kpe_cache")?,
        };
        let mut copied = Default::default();
        match slots.slots(OPERATOR, &mut copied)? {
            Slots::Table { batch_indices, positions, table } => {
                let new = NewMlaTokens { ckv, kpe, batch_indices, positions };
                append_paged_mla_kv_cache(backend, &new, cache, &table)
            }
            Slots::Arrays(arrays) => append_mla_to_slots(backend, NewMla { ckv, kpe }, cache, &arrays),
        }
    }
}

/// The request and the position of each new token.
#[pyfunction]
pub(crate) fn batch_indices_positions(
    py: Python<'_>,
    append_indptr: Integers,
    seq_lens: Integers,
) -> PyResult<(Vec<i32>, Vec<i32>)> {
    py.detach(|| {
        let lens = seq_lens.to_usize("kv.get_batch_indices_positions", "seq_len")?;
        get_batch_indices_positions(append_indptr.index(), &lens)
    })
    .map_err(raised)
}

/// The number of cached tokens of each request.
#[pyfunction]
pub(crate) fn seq_lens(py: Python<'_>, table: PageArrays) -> PyResult<Vec<usize>> {
    py.detach(|| get_seq_lens(&table.table()?)).map_err(raised)
}
