//! The memory of the KV pool: for each layer, K and V of all pages.

use half::{bf16, f16};
use tilewright::{
    Dtype, E4m3, E5m2, Element, KvCacheMut, KvLayout, Result, ViewMut, ensure,
    tensor::{Data, DataMut},
};

use crate::{model::ModelConfig, pages::PageId};

/// K and V of all layers: `[num_pages, page_size, num_kv_heads, head_dim]` each (NHD).
#[derive(Debug)]
pub(crate) struct KvPool {
    layers: Vec<[Memory; 2]>,
    shape: [usize; 4],
}

#[derive(Debug)]
enum Memory {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    E4m3(Vec<E4m3>),
    E5m2(Vec<E5m2>),
    I8(Vec<i8>),
}

impl KvPool {
    /// The layout of every layer's K and V.
    pub(crate) const LAYOUT: KvLayout = KvLayout::Nhd;

    /// The pages of all layers of a model, zeroed.
    ///
    /// # Errors
    /// When the machine does not have so much memory.
    pub(crate) fn for_model(
        config: &ModelConfig,
        (num_pages, page_size): (usize, usize),
        dtype: Dtype,
    ) -> Result<Self> {
        let shape =
            Self::LAYOUT.paged_shape(num_pages, page_size, config.num_key_value_heads, config.head_dim);
        let mut sizes = shape.into_iter().chain([2, config.num_hidden_layers]);
        let bytes = sizes.try_fold(dtype.size(), usize::checked_mul);
        // asked for as a whole and given back: without memory an allocation would end the process instead
        let given = bytes.is_some_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
        let bytes =
            bytes.map_or("more bytes than can be counted".to_owned(), |bytes| format!("{bytes} bytes"));
        ensure!(
            given,
            "engine.new",
            "{num_pages} pages of {page_size} tokens need {bytes}, which this machine does not give"
        );
        let len = shape.iter().product();
        let layers = (0..config.num_hidden_layers)
            .map(|_| [Memory::new(len, dtype), Memory::new(len, dtype)])
            .collect();
        Ok(Self { layers, shape })
    }

    /// K and V of one layer.
    pub(crate) fn layer(&mut self, layer: usize) -> Result<KvCacheMut<'_>> {
        let [k, v] = &mut self.layers[layer];
        Ok(KvCacheMut { k: ViewMut::new(k.data(), &self.shape)?, v: ViewMut::new(v.data(), &self.shape)? })
    }

    /// Copies whole pages, in all layers.
    pub(crate) fn copy_pages(&mut self, copies: &[(PageId, PageId)]) {
        let page: usize = self.shape[1..].iter().product();
        for memory in self.layers.iter_mut().flatten() {
            for &(from, to) in copies {
                memory.copy(page, from as usize, to as usize);
            }
        }
    }

    /// Bytes of all layers.
    pub(crate) fn bytes(&self) -> usize {
        self.layers.iter().flatten().map(Memory::bytes).sum()
    }
}

impl Memory {
    fn new(len: usize, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(vec![0.0; len]),
            Dtype::F16 => Self::F16(vec![f16::ZERO; len]),
            Dtype::Bf16 => Self::Bf16(vec![bf16::ZERO; len]),
            Dtype::E4m3 => Self::E4m3(vec![E4m3::default(); len]),
            Dtype::E5m2 => Self::E5m2(vec![E5m2::default(); len]),
            Dtype::I8 => Self::I8(vec![0; len]),
        }
    }

    fn data(&mut self) -> DataMut<'_> {
        match self {
            Self::F32(values) => DataMut::F32(values),
            Self::F16(values) => DataMut::F16(values),
            Self::Bf16(values) => DataMut::Bf16(values),
            Self::E4m3(values) => DataMut::E4m3(values),
            Self::E5m2(values) => DataMut::E5m2(values),
            Self::I8(values) => DataMut::I8(values),
        }
    }

    fn copy(&mut self, page: usize, from: usize, to: usize) {
        let (from, to) = (from * page..(from + 1) * page, to * page);
        match self {
            Self::F32(values) => values.copy_within(from, to),
            Self::F16(values) => values.copy_within(from, to),
            Self::Bf16(values) => values.copy_within(from, to),
            Self::E4m3(values) => values.copy_within(from, to),
            Self::E5m2(values) => values.copy_within(from, to),
            Self::I8(values) => values.copy_within(from, to),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::F32(values) => size_of_val(values.as_slice()),
            Self::F16(values) => size_of_val(values.as_slice()),
            Self::Bf16(values) => size_of_val(values.as_slice()),
            Self::E4m3(values) => size_of_val(values.as_slice()),
            Self::E5m2(values) => size_of_val(values.as_slice()),
            Self::I8(values) => size_of_val(values.as_slice()),
        }
    }
}

/// Widens row `row` of `table`, `[rows, out.len()]` of any dtype, into `out`.
pub(crate) fn widen_row(table: Data<'_>, row: usize, out: &mut [f32]) {
    fn widen<T: Element>(values: &[T], out: &mut [f32]) {
        out.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_f32());
    }
    let range = row * out.len()..(row + 1) * out.len();
    match table {
        Data::F32(values) => widen(&values[range], out),
        Data::F16(values) => widen(&values[range], out),
        Data::Bf16(values) => widen(&values[range], out),
        Data::E4m3(values) => widen(&values[range], out),
        Data::E5m2(values) => widen(&values[range], out),
        Data::I8(values) => widen(&values[range], out),
    }
}
