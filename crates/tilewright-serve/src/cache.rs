//! The memory of the KV pool: K and V of all pages, per layer.

use crate::{model::ModelConfig, pages::PageId};
use tilewright::{Backend, Dtype, KvCacheMut, KvLayout, Result, ensure, kv::copy_pages, tensor::Buffer};

/// K and V of all layers in the backend's memory, each `[num_pages, page_size, num_kv_heads, head_dim]` (NHD).
#[derive(Debug)]
pub(crate) struct KvPool {
    layers: Vec<[Buffer; 2]>,
    shape: [usize; 4],
}

impl KvPool {
    /// The layout of K and V in every layer.
    pub(crate) const LAYOUT: KvLayout = KvLayout::Nhd;

    /// Allocates the pages of all layers of a model.
    ///
    /// # Errors
    /// When the backend has too little memory.
    pub(crate) fn for_model<B: Backend>(
        backend: &B,
        config: &ModelConfig,
        num_pages: usize,
        page_size: usize,
        dtype: Dtype,
    ) -> Result<Self> {
        let shape =
            Self::LAYOUT.paged_shape(num_pages, page_size, config.num_key_value_heads, config.head_dim);
        let mut sizes = shape.into_iter().chain([2, config.num_hidden_layers]);
        let bytes = sizes.try_fold(dtype.size(), usize::checked_mul);
        // Reserves the total once and frees it: Linux may grant the layers one by one and kill the process at a later write.
        let probe =
            |bytes: usize| !backend.computes_on_host() || Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
        let fits = bytes.is_some_and(probe);
        let bytes =
            bytes.map_or("more bytes than can be counted".to_owned(), |bytes| format!("{bytes} bytes"));
        ensure!(
            fits,
            "engine.new",
            "{num_pages} pages of {page_size} tokens need {bytes}, which this machine does not give"
        );
        let len = shape.iter().product();
        let memory = || backend.allocate(dtype, len);
        let layers = (0..config.num_hidden_layers).map(|_| Ok([memory()?, memory()?]));
        Ok(Self { layers: layers.collect::<Result<_>>()?, shape })
    }

    /// K and V of one layer.
    pub(crate) fn layer(&mut self, layer: usize) -> Result<KvCacheMut<'_>> {
        let [k, v] = &mut self.layers[layer];
        Ok(KvCacheMut { k: k.view_mut(&self.shape)?, v: v.view_mut(&self.shape)? })
    }

    /// Copies full pages in all layers.
    pub(crate) fn copy_pages<B: Backend>(&mut self, backend: &B, copies: &[(PageId, PageId)]) -> Result<()> {
        if copies.is_empty() {
            return Ok(());
        }
        let copies: Vec<_> = copies.iter().map(|&(from, to)| (from as usize, to as usize)).collect();
        let mut memory = self.layers.iter_mut().flatten();
        memory.try_for_each(|memory| copy_pages(backend, memory.view_mut(&self.shape)?, &copies))
    }

    /// Bytes of all layers.
    pub(crate) fn bytes(&self) -> usize {
        self.layers.iter().flatten().map(Buffer::bytes).sum()
    }
}
