//! Configuration of MLA kernels, and its limits.

use super::layout::Layout;
use crate::attention::{
    call::Call,
    tensor_core::{Device, Items},
};
use tilewright::{Dtype, HeadDim};

/// Threads per CTA.
pub const THREADS: u32 = 256;

/// Compile-time configuration of an MLA kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// The dtype of queries, cache and outputs: f16 or bf16. Softmax weights are rounded to it.
    pub dtype: Dtype,
    /// Elements of queries and keys, and of the compressed part, which comes first and is the values: 576 and 512 in DeepSeek
    /// models.
    pub head_dim: HeadDim,
    /// Query heads. With 17 to 32 heads, tiles have at most as many rows as one token; all other counts give the same kernel.
    pub heads: usize,
    /// Item bodies in the kernel.
    pub items: Items,
    /// The target device.
    pub device: Device,
}

impl Config {
    /// Query rows per tile: the value for `Tiling::q_rows`. Larger items are processed tile by tile.
    pub fn q_rows(&self) -> usize {
        self.layout_of(Items::Any).map_or(0, |layout| 16 * layout.many.groups)
    }

    /// Bytes of shared memory per CTA; one CTA per SM.
    pub fn shared_bytes(&self) -> usize {
        self.layout().map_or(0, |layout| layout.cta.bytes)
    }

    /// The shared memory layout; `None` if it does not fit.
    pub(super) fn layout(&self) -> Option<Layout> {
        self.layout_of(self.items)
    }

    fn layout_of(&self, items: Items) -> Option<Layout> {
        let sm = self.device.shared_of_sm.saturating_sub(1024);
        Layout::new((self.head_dim, self.heads), items, sm.min(self.device.shared_of_cta))
    }

    /// Whether the kernel supports these arguments. Addresses and strides must be multiples of 16 bytes, those of the output of
    /// 8. Scales may differ between heads, not between pages. Called on every run, so it must not allocate.
    pub fn takes(&self, call: &Call) -> bool {
        let size = self.dtype.size();
        call.pe.is_some_and(|pe| pe.q.is_aligned(16, size) && pe.k.is_aligned(16, size))
            && call.q.is_aligned(16, size)
            && call.k.is_aligned(16, size)
            && call.o.is_aligned(8, size)
            && !(call.k_scale.is_of_pages() || call.v_scale.is_of_pages())
    }

    /// Reasons why the configuration is unsupported; empty if it is supported.
    pub fn refuses(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        let HeadDim { qk, vo } = self.head_dim;
        if self.device.arch < 80 {
            let arch = self.device.arch;
            reasons.push(format!("sm_{arch} has no asynchronous copies, expected sm_80 or newer"));
        }
        if !matches!(self.dtype, Dtype::F16 | Dtype::Bf16) {
            reasons.push(format!("queries and the cache are {}, expected f16 or bf16", self.dtype));
        }
        if !(128..=512).contains(&vo) || !vo.is_multiple_of(128) {
            reasons.push(format!("head_dim ckv = {vo}, expected a multiple of 128 in 128..=512"));
        }
        if qk <= vo || !(qk - vo).is_multiple_of(64) {
            let pe = qk.saturating_sub(vo);
            reasons.push(format!("head_dim kpe = {pe}, expected a multiple of 64 above 0"));
        }
        if reasons.is_empty() && self.layout().is_none() {
            let bytes = self.device.shared_of_cta;
            reasons.push(format!(
                "a CTA has {bytes} bytes of shared memory, which is too little for two KV tiles"
            ));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::{Config, Device, Items};
    use crate::attention::call::{CacheTensor, Call, KvLayout, Pe, PlanArgs, RowTensor, ScaleArgs};
    use tilewright::{Dtype, HeadDim};

    /// The head dims of DeepSeek models.
    fn config(arch: u32) -> Config {
        let head_dim = HeadDim { qk: 576, vo: 512 };
        Config { dtype: Dtype::Bf16, head_dim, heads: 128, items: Items::Any, device: Device::of_arch(arch) }
    }

    #[test]
    fn refusals_have_all_reasons() {
        let sound = config(90);
        assert!(sound.refuses().is_empty());
        let wrong = Config { dtype: Dtype::F32, head_dim: HeadDim { qk: 136, vo: 96 }, ..sound };
        assert_eq!(
            wrong.refuses(),
            [
                "queries and the cache are f32, expected f16 or bf16",
                "head_dim ckv = 96, expected a multiple of 128 in 128..=512",
                "head_dim kpe = 40, expected a multiple of 64 above 0",
            ]
        );
        let small = Device { shared_of_cta: 48 << 10, ..sound.device };
        assert_eq!(
            Config { device: small, ..sound }.refuses(),
            ["a CTA has 49152 bytes of shared memory, which is too little for two KV tiles"]
        );
    }

    #[test]
    fn tiles_have_as_many_rows_as_shared_memory_has_room_for() {
        for (arch, rows) in [(80, 64), (86, 32), (89, 32), (90, 64), (100, 64), (120, 32)] {
            let config = config(arch);
            let few = Config { items: Items::Few, ..config };
            assert_eq!((config.q_rows(), few.q_rows()), (rows, rows), "sm_{arch}");
            assert!(config.refuses().is_empty() && few.refuses().is_empty(), "sm_{arch}");
            let of_heads = |heads| Config { heads, ..config }.q_rows();
            assert_eq!([16, 17, 32, 33].map(of_heads), [rows, 32, 32, rows], "sm_{arch}");
            assert!(few.shared_bytes() > 0 && config.shared_bytes() <= config.device.shared_of_cta);
        }
    }

    /// Parameters with the minimum alignment.
    fn call() -> Call {
        let row = |address| RowTensor { address, row: address / 2, head: 3 * address / 2 };
        let cache = CacheTensor { address: 48, page: 24, token: 8, head: 40 };
        let scale = ScaleArgs { address: 4, page: 0, head: 1, factor: 1.0 };
        Call {
            q: row(16),
            k: cache,
            v: CacheTensor::default(),
            pe: Some(Pe { q: row(16), k: cache }),
            o: row(8),
            lse: 4,
            partial_o: 16,
            partial_lse: 4,
            plan: PlanArgs::default(),
            qo_heads: 1,
            group: 1,
            page_size: 1,
            layout: KvLayout::Paged,
            left: 0,
            right: 0,
            scale: 1.0,
            k_scale: scale,
            v_scale: scale,
            variant: Vec::new(),
        }
    }

    #[test]
    fn calls_are_taken_if_nothing_speaks_against_them() {
        let config = config(90);
        assert!(config.takes(&call()));
        let wrong: [fn(&mut Call); 11] = [
            |call| call.q.address += 8,
            |call| call.q.head += 4,
            |call| call.k.page += 4,
            |call| call.k.token += 4,
            |call| call.pe = None,
            |call| call.pe = call.pe.map(|pe| Pe { q: RowTensor { row: 4, ..pe.q }, ..pe }),
            |call| call.pe = call.pe.map(|pe| Pe { k: CacheTensor { address: 24, ..pe.k }, ..pe }),
            |call| call.o.address += 4,
            |call| call.o.row += 2,
            |call| call.k_scale.page = 1,
            |call| call.v_scale.page = 1,
        ];
        for (at, change) in wrong.into_iter().enumerate() {
            let mut call = call();
            change(&mut call);
            assert!(!config.takes(&call), "change {at}");
        }
    }
}
