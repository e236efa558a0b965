//! Page-table lookup of the keys and values of a warp's stages.

use super::{cta::MmaCta, page_lookup::KvSource, page_scales};
use crate::attention::params::KvLayout;
use tilewright_ptx::build::{Builder, Shared, Value, Var};

/// Lookup of the keys and values of a warp's stages, each in two steps: the page number is requested long before it is used. Lanes
/// below 16 look up keys, the others values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StageLookup<'k> {
    cta: MmaCta<'k>,
    entries: Shared<'k, u32>,
    /// Unless registers are short.
    tensor: Option<LaneTensor<'k>>,
}

/// Address of this lane's tensor, and strides of heads, pages and tokens, in bytes.
#[derive(Debug, Clone, Copy)]
struct LaneTensor<'k> {
    address: Value<'k, u64>,
    head: Value<'k, u64>,
    page: Value<'k, u64>,
    token: Value<'k, u64>,
}

impl<'k> LaneTensor<'k> {
    fn new(cta: &MmaCta<'k>) -> Self {
        let (k, v, is_key) = (cta.params.k, cta.params.v, cta.k.lane().lt(STAGE_KEYS));
        let bytes = |key: Value<'k, u64>, value: Value<'k, u64>| {
            is_key.select::<u64>(key, value) * cta.kv.size() as u64
        };
        Self {
            address: is_key.select(k.address, v.address),
            head: bytes(k.head, v.head),
            page: bytes(k.page, v.page),
            token: bytes(k.token, v.token),
        }
    }
}

/// A stage that is looked up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingStage<'k> {
    /// The page of this lane's key.
    page: Var<'k, u32>,
    /// The address of the key in page 0.
    address: Var<'k, u64>,
    /// The number of keys that exist, beginning with the first, and from bit [`HEAD_SHIFT`] on the KV head.
    keys: Var<'k, u32>,
}

impl<'k> PendingStage<'k> {
    pub(crate) fn new(k: &'k Builder) -> Self {
        Self { page: k.var("page", 0), address: k.var("key_address", 0), keys: k.var("keys", 0) }
    }

    /// The number of keys that exist, beginning with the first.
    pub(crate) fn count(&self) -> Value<'k, u32> {
        self.keys.get() & ((1 << HEAD_SHIFT) - 1)
    }

    /// Becomes `other`.
    pub(crate) fn set(&self, other: Self) {
        self.page.set(other.page.get());
        self.address.set(other.address.get());
        self.keys.set(other.keys.get());
    }

    /// Becomes a stage of no keys.
    pub(crate) fn clear(&self) {
        [self.page, self.keys].iter().for_each(|word| word.set(0));
        self.address.set(0);
    }
}

/// Keys per stage.
const STAGE_KEYS: u32 = 16;
/// Bits of a number of keys.
const HEAD_SHIFT: u32 = STAGE_KEYS.ilog2() + 1;
/// Maximum elements of a value with which strides and several stages stay in registers.
pub(crate) const MAX_HOISTED_DIM: usize = 128;

impl<'k> StageLookup<'k> {
    /// Writes entries `[2][16]` to `entries`.
    pub(crate) fn new(cta: &MmaCta<'k>, entries: Shared<'k, u32>) -> Self {
        let tensor = (cta.layout.v.dim <= MAX_HOISTED_DIM).then(|| LaneTensor::new(cta));
        Self { cta: *cta, entries, tensor }
    }

    fn tensor(&self) -> LaneTensor<'k> {
        self.tensor.unwrap_or_else(|| LaneTensor::new(&self.cta))
    }

    /// Requests the pages of the stage of `from` at key `first`.
    #[track_caller]
    pub(crate) fn request(&self, from: KvSource<'k>, first: Value<'k, u32>, to: PendingStage<'k>) {
        let (k, params) = (self.cta.k, &self.cta.params);
        let in_stage = k.lane() & (STAGE_KEYS - 1);
        let key = first + in_stage;
        let is_ragged = params.has_layout(KvLayout::Ragged);
        let (page, slot) = params.page_size.divide(key);
        let slot = slot.unless(is_ragged, from.start + key);
        let count = (from.end - first).min(STAGE_KEYS).unless(first.ge(from.end), 0);
        to.keys.set(count | (from.head << HEAD_SHIFT));
        to.page.set(0);
        k.when(key.lt(from.end) & !is_ragged, || {
            to.page.set(params.indices.at(from.start + page).load());
        });
        // the address must be valid even though nothing is loaded after the last key
        let slot = slot.unless(key.ge(from.end), 0);
        let tensor = self.tensor();
        to.address.set(tensor.address + from.head.to_u64() * tensor.head + slot.to_u64() * tensor.token);
    }

    /// Writes the entries of a stage.
    #[track_caller]
    pub(crate) fn write_entries(&self, stage: PendingStage<'k>) {
        let k = self.cta.k;
        let exists = (k.lane() & (STAGE_KEYS - 1)).lt(stage.count());
        let address = stage.address.get() + stage.page.get().to_u64() * self.tensor().page;
        let is_key = k.lane().lt(STAGE_KEYS);
        let at = (stage.page.get(), stage.keys.get() >> HEAD_SHIFT);
        let scale = page_scales::entry_scale(&self.cta, (is_key, exists), at);
        let words = [address.low(), address.high(), exists.select(1, 0), scale];
        self.entries.byte(k.lane() << 4).store_vector(words);
    }
}
