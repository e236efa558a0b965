//! Page-table lookup of the keys and values of a warp's stages.

use super::{KvSource, MmaCta, RowFormat, WARPS, page_scales};
use crate::attention::{CacheTensorRegs, KvLayout, NONE};
use tilewright_ptx::{Builder, Shared, Value, Var};

/// Lookup of the keys and values of a warp's stages, each in two steps: the page number is requested long before it is used. In
/// stages of 16 keys, lanes below 16 look up keys, the others values; in stages of 32 keys, each lane looks up both.
///
/// For stages that TMA loads, lanes look up boxes of keys and values instead: at once the pages of 32 boxes, which are those of
/// several stages of the warp if boxes have 16 keys, so that few stages wait for page numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StageLookup<'k> {
    cta: MmaCta<'k>,
    entries: Shared<'k, u32>,
    /// Keys per stage, 16 or 32.
    keys: usize,
    /// That of lanes with one tensor, unless registers are short.
    tensor: Option<LaneTensor<'k>>,
}

/// Address of a tensor, and strides of heads, pages and tokens, in bytes.
#[derive(Debug, Clone, Copy)]
struct LaneTensor<'k> {
    address: Value<'k, u64>,
    head: Value<'k, u64>,
    page: Value<'k, u64>,
    token: Value<'k, u64>,
}

impl<'k> LaneTensor<'k> {
    fn new(tensor: &CacheTensorRegs<'k>, size: usize) -> Self {
        let [head, page, token] =
            [tensor.head, tensor.page, tensor.token].map(|elements| elements * size as u64);
        Self { address: tensor.address, head, page, token }
    }

    /// Keys below lane 16, values from there on.
    fn of_half(cta: &MmaCta<'k>) -> Self {
        let is_key = cta.k.lane().lt(16);
        let [key, value] = [cta.params.k, cta.params.v].map(|tensor| Self::new(&tensor, cta.kv.size()));
        Self {
            address: is_key.select(key.address, value.address),
            head: is_key.select(key.head, value.head),
            page: is_key.select(key.page, value.page),
            token: is_key.select(key.token, value.token),
        }
    }
}

/// The boxes of a stage that is looked up.
#[derive(Debug, Clone, Copy)]
struct PendingBoxes<'k> {
    /// The slot of this lane's box, unless pages have one.
    slot: Option<Var<'k, u32>>,
    /// The lane that holds the page of the stage's first box.
    holder: Var<'k, u32>,
    /// Number of boxes requested so far of those of which the lanes hold the pages; 0 before the next pages are loaded.
    requested: Var<'k, u32>,
}

/// The first key of a box in its tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BoxCorner<'k> {
    /// `None` if pages have one slot.
    slot: Option<Value<'k, u32>>,
    head: Value<'k, u32>,
    page: Value<'k, u32>,
}

impl<'k> BoxCorner<'k> {
    /// The coordinates of a lane's corner, from the dimension after elements on.
    pub(crate) fn of_lane(&self, lane: u32) -> Vec<Value<'k, u32>> {
        let own = self.slot.into_iter().chain([self.head, self.page]);
        own.map(|coordinate| coordinate.of_lane(lane)).collect()
    }
}

/// A stage that is looked up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingStage<'k> {
    /// The page of this lane's key or box.
    page: Var<'k, u32>,
    /// The addresses of the key and its value in page 0, or of one of them; none for boxes.
    addresses: [Option<Var<'k, u64>>; 2],
    /// Its boxes, if TMA loads it.
    boxes: Option<PendingBoxes<'k>>,
    /// The number of keys that exist, beginning with the first, and from bit [`HEAD_SHIFT`] on the KV head.
    keys: Var<'k, u32>,
}

impl<'k> PendingStage<'k> {
    /// Of `keys` keys, in boxes or in rows.
    pub(crate) fn new(k: &'k Builder, keys: usize, format: RowFormat) -> Self {
        let address = |exists: bool, name| exists.then(|| k.var(name, 0));
        let boxes = |box_keys: usize| {
            let slot = (box_keys > 1).then(|| k.var("slot", 0));
            let [holder, requested] = ["holder", "requested"].map(|name| k.var(name, 0));
            PendingBoxes { slot, holder, requested }
        };
        Self {
            page: k.var("page", 0),
            addresses: [
                address(format.box_rows.is_none(), "key_address"),
                address(format.box_rows.is_none() && keys > 16, "value_address"),
            ],
            boxes: format.box_rows.map(boxes),
            keys: k.var("keys", 0),
        }
    }

    /// Another stage of `keys` keys. Its boxes have the same pages, unless a stage has as many boxes as a warp has lanes.
    pub(crate) fn another(&self, k: &'k Builder, keys: usize, format: RowFormat) -> Self {
        let new = Self::new(k, keys, format);
        let Some(PendingBoxes { requested, .. }) = self.boxes else { return new };
        let boxes = new.boxes.map(|boxes| PendingBoxes { requested, ..boxes });
        let page = if format.boxes(keys) < LANES { self.page } else { new.page };
        Self { page, boxes, ..new }
    }

    /// The next stage does not follow this one: its pages are loaded.
    pub(crate) fn restart(&self) {
        self.boxes.iter().for_each(|boxes| boxes.requested.set(0));
    }

    /// The number of keys that exist, beginning with the first.
    pub(crate) fn count(&self) -> Value<'k, u32> {
        self.keys.get() & ((1 << HEAD_SHIFT) - 1)
    }

    /// Becomes a stage of no keys.
    pub(crate) fn clear(&self) {
        [self.page, self.keys].iter().for_each(|word| word.set(0));
        self.addresses.iter().flatten().for_each(|address| address.set(0));
    }
}

/// Lanes of a warp.
const LANES: usize = 32;
/// Bits of a number of keys of at most 32.
const HEAD_SHIFT: u32 = 6;
/// Maximum elements of a value with which strides stay in registers.
const MAX_HOISTED_DIM: usize = 128;

impl<'k> StageLookup<'k> {
    /// Writes entries `[2][keys]` to `entries`.
    pub(crate) fn new(cta: &MmaCta<'k>, entries: Shared<'k, u32>, keys: usize) -> Self {
        let is_hoisted = keys == 16 && cta.layout.v.dim <= MAX_HOISTED_DIM;
        let tensor = is_hoisted.then(|| LaneTensor::of_half(cta));
        Self { cta: *cta, entries, keys, tensor }
    }

    /// The tensors of this lane.
    fn tensors(&self) -> Vec<LaneTensor<'k>> {
        let params = &self.cta.params;
        match self.keys {
            16 => vec![self.tensor.unwrap_or_else(|| LaneTensor::of_half(&self.cta))],
            _ => [params.k, params.v].map(|tensor| LaneTensor::new(&tensor, self.cta.kv.size())).into(),
        }
    }

    fn in_stage(&self) -> Value<'k, u32> {
        self.cta.k.lane() & (self.keys as u32 - 1)
    }

    /// Requests the pages of the stage of `from` at key `first`.
    #[track_caller]
    pub(crate) fn request(&self, from: KvSource<'k>, first: Value<'k, u32>, to: PendingStage<'k>) {
        let (k, params) = (self.cta.k, &self.cta.params);
        let count = || (from.end - first).min(self.keys as u32).unless(first.ge(from.end), 0);
        if let Some(boxes) = to.boxes {
            to.keys.set(count() | (from.head << HEAD_SHIFT));
            return self.request_boxes(from, first, to.page, boxes);
        }
        let key = first + self.in_stage();
        let is_ragged = params.has_layout(KvLayout::Ragged);
        let (page, slot) = params.page_size.divide(key);
        let slot = slot.unless(is_ragged, from.start + key);
        to.keys.set(count() | (from.head << HEAD_SHIFT));
        to.page.set(0);
        k.when(key.lt(from.end) & !is_ragged, || {
            to.page.set(params.plan.indices.at(from.start + page).load());
        });
        // the address must be valid even though nothing is loaded after the last key
        let slot = slot.unless(key.ge(from.end), 0);
        for (address, tensor) in to.addresses.iter().flatten().zip(self.tensors()) {
            let in_page = from.head.to_u64() * tensor.head + slot.to_u64() * tensor.token;
            address.set(tensor.address + in_page);
        }
    }

    /// Boxes of a stage.
    fn boxes(&self) -> u32 {
        self.cta.layout.stored_k.boxes(self.keys) as u32
    }

    /// Looks up the slots of the boxes of a stage, and the pages of its and the next stages' boxes, unless the lanes hold them.
    fn request_boxes(
        &self,
        from: KvSource<'k>,
        first: Value<'k, u32>,
        pages: Var<'k, u32>,
        to: PendingBoxes<'k>,
    ) {
        let (k, params, lane) = (self.cta.k, &self.cta.params, self.cta.k.lane());
        let boxes = self.boxes();
        let is_ragged = params.has_layout(KvLayout::Ragged);
        let in_stage = (lane & (boxes - 1)) * (self.keys as u32 / boxes);
        let requested = to.requested.get() & (LANES as u32 - 1);
        k.when(requested.eq(0), || {
            let key = first + (lane / boxes) * (WARPS * self.keys) as u32 + in_stage;
            pages.set(key.lt(from.end).select::<u32>(0, NONE));
            k.when(key.lt(from.end) & !is_ragged, || {
                let page = params.page_size.quotient(key);
                pages.set(params.plan.indices.at(from.start + page).load());
            });
        });
        to.holder.set(requested);
        to.requested.set(requested + boxes);
        if let Some(to) = to.slot {
            let key = first + in_stage;
            let (_, slot) = params.page_size.divide(key);
            to.set(slot.unless(is_ragged, from.start + key));
        }
    }

    /// The corner of this lane's box of a stage; `None` if the stage has no boxes.
    #[track_caller]
    pub(crate) fn corner(&self, stage: PendingStage<'k>) -> Option<BoxCorner<'k>> {
        stage.boxes.map(|boxes| {
            let holder = boxes.holder.get() + (self.cta.k.lane() & (self.boxes() - 1));
            BoxCorner {
                slot: boxes.slot.map(|slot| slot.get()),
                head: stage.keys.get() >> HEAD_SHIFT,
                page: stage.page.get().of_lane(holder),
            }
        })
    }

    /// Writes the entries of a stage.
    #[track_caller]
    pub(crate) fn write_entries(&self, stage: PendingStage<'k>) {
        let k = self.cta.k;
        let exists = self.in_stage().lt(stage.count());
        let (page, head) = (stage.page.get(), stage.keys.get() >> HEAD_SHIFT);
        let tensors = self.tensors();
        for (i, (address, tensor)) in stage.addresses.iter().flatten().zip(&tensors).enumerate() {
            let is_key = if tensors.len() > 1 { k.constant(i == 0) } else { k.lane().lt(16) };
            let address = address.get() + stage.page.get().to_u64() * tensor.page;
            let scale = page_scales::entry_scale(&self.cta, is_key, exists, page, head);
            let words = [address.low(), address.high(), exists.select(1, 0), scale];
            self.entries.byte(k.lane() << 4).plus(i * self.keys * 4).store_vector(words);
        }
    }
}
