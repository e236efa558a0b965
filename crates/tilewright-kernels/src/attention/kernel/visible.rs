//! Visible masks: the keys of a KV tile that a row sees, one bit per key, from key ranges, block positions and mask bits.

use super::cta::MmaCta;
use crate::attention::{items::WorkItemRegs, params::AttentionParamRegs};
use tilewright_ptx::{Builder, Global, Value};

/// Keys of a KV tile: `width` (at most 64) keys from `first` on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyRange<'k> {
    pub(crate) first: Value<'k, u32>,
    pub(crate) width: u32,
}

/// The visible mask of row `row` of the item, which sees keys, or positions in block-sparse attention, of `range`, without its end.
pub(crate) fn visible_mask<'k>(
    cta: &MmaCta<'k>,
    item: &WorkItemRegs<'k>,
    row: Value<'k, u32>,
    range: (Value<'k, i32>, Value<'k, i32>),
    keys: KeyRange<'k>,
) -> Value<'k, u64> {
    let (from, to) = range;
    let (k, blocks) = (cta.k, cta.is_blocks());
    let first = keys.first.reinterpret::<i32>();
    let local = |at: Value<'k, i32>| low_bits(k, (at - first).max(0).reinterpret());
    let (by_key, end) = (item.kv_end.reinterpret::<i32>(), local(to));
    let end = blocks.select(local(by_key), end);
    let begin = local(from).unless(blocks, 0);
    let word = k.var("visible", end & !begin);
    k.when(blocks & (from.gt(0) | to.lt(i32::MAX)), || {
        let hide = |at: Value<'k, u32>| {
            let key = keys.first + at;
            k.when(key.lt(item.kv_end), || {
                let key_position = key_position(cta, item, key);
                let hidden = key_position.lt(from) | key_position.ge(to);
                let bit = (k.constant(1_u64) << at).unless(!hidden, 0);
                word.set(word.get() & !bit);
            });
        };
        // unrolled, the loop is a tenth of a `split_kv` kernel; rolled, it takes registers that these kernels lack on other GPUs
        match cta.arch == 90 && keys.width <= 32 {
            true => k.repeat_rolled((0, keys.width), 1, hide),
            false => k.repeat((0, keys.width), 1, hide),
        }
    });
    let free = item.kv_len - item.mask_columns;
    k.when(item.mask_columns.gt(0) & (keys.first + keys.width).gt(free), || {
        word.set(word.get() & mask_bits(cta, item, row, keys));
    });
    word.get()
}

/// The visible mask of a row that sees the keys `from..to`.
pub(crate) fn range_mask<'k>(
    k: &'k Builder,
    keys: KeyRange<'k>,
    from: Value<'k, i32>,
    to: Value<'k, i32>,
) -> Value<'k, u64> {
    let first = keys.first.reinterpret::<i32>();
    let local = |at: Value<'k, i32>| low_bits(k, (at - first).max(0).reinterpret());
    local(to) & !local(from)
}

/// The position of an existing key.
#[track_caller]
pub(crate) fn key_position<'k>(
    cta: &MmaCta<'k>,
    item: &WorkItemRegs<'k>,
    key: Value<'k, u32>,
) -> Value<'k, i32> {
    let (k, params) = (cta.k, &cta.params);
    let key_position = k.var::<u32>("position", item.base + key);
    k.when(cta.is_blocks(), || {
        let (block, slot) = params.page_size.divide(key);
        key_position.set(params.plan.indices.at(item.kv_start + block).load() * params.page_size.by + slot);
    });
    key_position.get().reinterpret()
}

/// The mask bits of a row for some keys, at least one of which has a bit; keys without a bit are visible.
fn mask_bits<'k>(
    cta: &MmaCta<'k>,
    item: &WorkItemRegs<'k>,
    row: Value<'k, u32>,
    keys: KeyRange<'k>,
) -> Value<'k, u64> {
    let k = cta.k;
    let free = item.kv_len - item.mask_columns;
    // keys before the first column, keys that have bits, and the first column of these
    let free_keys = free.max(keys.first) - keys.first;
    let end = (item.kv_end.max(keys.first) - keys.first).min(keys.width);
    let count = end.max(free_keys) - free_keys;
    let column = keys.first + free_keys - free;
    let bit = mask_bit(item, cta.params.group.quotient(row), column);
    let (first, of_item) = (mask_bit(item, k.constant(0), k.constant(0)), item.qo_len * item.mask_columns);
    let bits = MaskBits { bytes: cta.params.plan.mask_bits, bit, count, end: first + of_item.to_u64() };
    low_bits(k, free_keys) | (bits.load(k) << free_keys)
}

/// At most 64 consecutive mask bits of an item.
struct MaskBits<'k> {
    /// Address of all mask bits.
    bytes: Value<'k, u64>,
    /// The first bit.
    bit: Value<'k, u64>,
    /// Number of bits.
    count: Value<'k, u32>,
    /// One past the last bit of the item, which all masks in front of it precede.
    end: Value<'k, u64>,
}

impl<'k> MaskBits<'k> {
    /// The bits, from the lowest on; higher bits have any value. All words are loaded at once; at the edges of the item, where they
    /// may exceed the tensor, bytes are loaded.
    fn load(&self, k: &'k Builder) -> Value<'k, u64> {
        let byte = self.bytes + (self.bit >> 3);
        let misaligned = byte.low() & 3;
        let words = Global::<u32>::new(byte - misaligned.to_u64());
        let skip = (misaligned << 3) + (self.bit.low() & 7);
        let needed = (skip + self.count + 31) >> 5;
        let end = words.address() + (needed << 2).to_u64();
        let inside = words.address().ge(self.bytes) & end.le(self.bytes + (self.end >> 3));
        let result = k.var::<u64>("mask_bits_of_row", 0);
        k.when_else(
            inside,
            || {
                let loaded = [0, 1, 2].map(|at| {
                    let word = k.var::<u32>("mask_word", 0);
                    k.when(needed.gt(at), || word.set(words.plus(at as usize).load()));
                    word.get()
                });
                let pair = |at: usize| (k.pack32(loaded[at], loaded[at + 1]) >> skip).low();
                result.set(k.pack32(pair(0), pair(1)));
            },
            || result.set(self.load_bytes(k)),
        );
        result.get()
    }

    fn load_bytes(&self, k: &'k Builder) -> Value<'k, u64> {
        let skip = self.bit.low() & 7;
        let bytes = Global::<u32>::new(self.bytes + (self.bit >> 3));
        let word = k.var::<u64>("mask_bytes_of_row", 0);
        k.repeat((0, (skip + self.count + 7) >> 3), 1, |at| {
            let eight = Global::<u32>::new(bytes.address() + at.to_u64()).load_u8().to_u64();
            let first = at.eq(0).select(eight >> skip, eight << ((at << 3) - skip));
            word.set(word.get() | first);
        });
        word.get()
    }
}

/// The index of the mask bit of token `token` of an item and a column of its mask.
#[track_caller]
pub(crate) fn mask_bit<'k>(
    item: &WorkItemRegs<'k>,
    token: Value<'k, u32>,
    column: Value<'k, u32>,
) -> Value<'k, u64> {
    let first = token.builder().pack32(item.mask_bit_low, item.mask_bit_high);
    first + token.to_u64() * item.mask_columns.to_u64() + column.to_u64()
}

/// The window of a row at position `position`: `position - left ..position + right + 1`, limited by `clamp`. `left` and `right`
/// go up to 2^32 - 1, which exceeds any distance and so means no limit.
#[track_caller]
pub(crate) fn window<'k>(
    params: &AttentionParamRegs<'k>,
    position: Value<'k, i64>,
    clamp: impl Fn(Value<'k, i64>) -> Value<'k, i64>,
) -> (Value<'k, i32>, Value<'k, i32>) {
    let to_i32 = |at: Value<'k, i64>| clamp(at).reinterpret::<u64>().low().reinterpret::<i32>();
    (to_i32(position - to_i64(params.left)), to_i32(position + to_i64(params.right) + 1))
}

#[track_caller]
pub(crate) fn to_i64(x: Value<'_, u32>) -> Value<'_, i64> {
    x.to_u64().reinterpret()
}

/// The lowest `count` bits; all bits from 64 on.
#[track_caller]
fn low_bits<'k>(k: &'k Builder, count: Value<'k, u32>) -> Value<'k, u64> {
    // a shift by 64 or more gives 0
    !(k.constant(u64::MAX) << count)
}
