//! Key table of a KV tile: addresses, positions and scales, looked up by one thread per key.
//!
//! The tensor-core kernels have `kernel/page_lookup.rs` instead, which prefetches pages and feeds asynchronous copies. This body
//! looks up a tile when it needs it, for elements of any alignment.

use super::{KEYS, block::SimtCta, elements};
use crate::attention::{CacheTensorRegs, KvLayout, WorkItemRegs};
use tilewright_ptx::{Builder, Shared, Value};

/// The key table in shared memory, `[64]` each.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyTable<'k> {
    /// Address of each key in the item's head; 0 if the item does not have the key.
    pub(super) k: Shared<'k, u64>,
    /// Address of the positional part of MLA keys.
    pub(super) pe: Shared<'k, u64>,
    /// Address of each value.
    pub(super) v: Shared<'k, u64>,
    pub(super) position: Shared<'k, i32>,
    pub(super) k_scale: Shared<'k, f32>,
    pub(super) v_scale: Shared<'k, f32>,
}

impl<'k> KeyTable<'k> {
    pub(super) fn new(k: &'k Builder) -> Self {
        let keys = KEYS as usize;
        Self {
            k: k.shared("key_at", keys, 8),
            pe: k.shared("pe_at", keys, 8),
            v: k.shared("value_at", keys, 8),
            position: k.shared("key_position", keys, 4),
            k_scale: k.shared("k_scale_of", keys, 4),
            v_scale: k.shared("v_scale_of", keys, 4),
        }
    }

    /// Whether the key with this address exists.
    #[track_caller]
    pub(super) fn is_real(address: Value<'k, u64>) -> Value<'k, bool> {
        (address.low() | address.high()).ne(0)
    }
}

impl<'k> SimtCta<'k, '_> {
    /// Looks up the keys of the tile that begins at key `tile` of the segment.
    #[track_caller]
    pub(super) fn look_up_keys(&self, item: &WorkItemRegs<'k>, tile: Value<'k, u32>) {
        let (k, thread) = (self.k, self.k.thread());
        let key = tile + thread;
        k.when(thread.lt(KEYS), || {
            let in_range = key.ge(item.kv_begin) & key.lt(item.kv_end);
            k.when_else(in_range, || self.write_key(item, key), || self.write_missing_key());
        });
    }

    /// Writes this thread's table entry for key `key` of the segment.
    #[track_caller]
    fn write_key(&self, item: &WorkItemRegs<'k>, key: Value<'k, u32>) {
        let (k, keys, params, thread) = (self.k, &self.keys, &self.params, self.k.thread());
        let (page, slot) = (k.var::<u32>("page", 0), k.var::<u32>("slot", item.kv_start + key));
        k.when(!params.has_layout(KvLayout::Ragged), || {
            let (entry, in_page) = params.page_size.divide(key);
            page.set(params.plan.indices.at_wide((item.kv_start + entry).to_u64()).load());
            slot.set(in_page);
        });
        let (page, slot) = (page.get(), slot.get());
        let address = |tensor: &CacheTensorRegs<'k>| {
            let offset = tensor.offset(page.to_u64(), slot.to_u64(), item.kv_head);
            elements::address_of(self.config.dtype_kv, tensor.address, offset)
        };
        let k_at = address(&params.k);
        keys.k.at(thread).store(k_at);
        keys.v.at(thread).store(if self.config.mla { k_at } else { address(&params.v) });
        if let Some(pe) = &params.pe {
            keys.pe.at(thread).store(address(&pe.k));
        }
        let in_blocks = page * params.page_size.by + slot;
        let position = params.has_layout(KvLayout::Blocks).select(in_blocks, item.base + key);
        keys.position.at(thread).store(position.reinterpret::<i32>());
        // only pages have individual scales
        let page = params.has_layout(KvLayout::Paged).select(page, 0);
        keys.k_scale.at(thread).store(params.k_scale.at(k, page, item.kv_head));
        keys.v_scale.at(thread).store(params.v_scale.at(k, page, item.kv_head));
    }

    /// Writes this thread's table entry for a key that the item does not have.
    #[track_caller]
    fn write_missing_key(&self) {
        let (keys, thread) = (&self.keys, self.k.thread());
        keys.k.at(thread).store(0);
        keys.v.at(thread).store(0);
        if self.config.mla {
            keys.pe.at(thread).store(0);
        }
        keys.position.at(thread).store(0);
        keys.k_scale.at(thread).store(0.0);
        keys.v_scale.at(thread).store(0.0);
    }
}
