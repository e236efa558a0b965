//! Query tiles: a tile of query rows of a request, and the keys that it sees.

use super::{PlanDeviceRegs, lengths::RequestLengths};
use tilewright_ptx::{Builder, Value, Var};

/// A tile of query rows of a request, and the keys that it sees.
#[derive(Clone, Copy)]
pub(super) struct QueryTile<'k> {
    pub(super) begin: Value<'k, u32>,
    pub(super) rows: Value<'k, u32>,
    /// Offset from row number to position.
    pub(super) offset: Value<'k, u32>,
    pub(super) kv_start: Value<'k, u32>,
    pub(super) kv_len: Value<'k, u32>,
    pub(super) kv_end: Value<'k, u32>,
    pub(super) first_tile: Value<'k, u32>,
    pub(super) tiles: Value<'k, u32>,
}

impl<'k> QueryTile<'k> {
    /// The query tile of a request that begins at row `begin`.
    pub(super) fn of(p: &PlanDeviceRegs<'k>, request: RequestLengths<'k>, begin: Value<'k, u32>) -> Self {
        let rows = p.tile.by.min(request.qo_end - begin);
        let signed = |value: Value<'k, u32>| value.reinterpret::<i32>();
        let (offset, kv_len) = (signed(request.offset()), signed(request.kv_len));
        let (first, last) = (signed(begin) + offset, signed(begin + rows) + offset - 1);
        // positions ascend, so visible ranges do too; the last position is below `kv_len`
        let start = (first - signed(p.left)).max(0).reinterpret::<u32>();
        let kv_end = (last + 1 + signed(p.right)).max(0).min(kv_len).reinterpret::<u32>();
        let first_tile = p.kv_tokens.quotient(start);
        let until = p.kv_tokens.quotient(kv_end + p.kv_tokens.by - 1);
        let tiles = (until - first_tile).unless(start.ge(kv_end), 0_u32);
        let RequestLengths { kv_start, kv_len, .. } = request;
        Self { begin, rows, offset: request.offset(), kv_start, kv_len, kv_end, first_tile, tiles }
    }

    /// Cost per KV tile and head.
    pub(super) fn cost_per_tile(&self, p: &PlanDeviceRegs<'k>) -> Value<'k, u32> {
        p.tile_load + self.rows
    }

    /// Cost per head.
    pub(super) fn cost(&self, p: &PlanDeviceRegs<'k>) -> Value<'k, u64> {
        self.cost_per_tile(p).to_u64() * (p.overhead + self.tiles).to_u64()
    }

    /// The keys of KV tiles `from..to`.
    pub(super) fn keys(
        &self,
        p: &PlanDeviceRegs<'k>,
        from: Value<'k, u32>,
        to: Value<'k, u32>,
    ) -> [Value<'k, u32>; 2] {
        [from, to].map(|tile| ((self.first_tile + tile) * p.kv_tokens.by).min(self.kv_end))
    }
}

/// Variables of a query tile that some threads find, with its request and KV head.
#[derive(Clone, Copy)]
pub(super) struct QueryTileVars<'k>([Var<'k, u32>; 10]);

impl<'k> QueryTileVars<'k> {
    pub(super) fn declare(k: &'k Builder) -> Self {
        let names = [
            "request", "head", "begin", "rows", "offset", "kv_start", "kv_len", "kv_end", "first_tile",
            "tiles",
        ];
        Self(names.map(|name| k.var(name, 0_u32)))
    }

    pub(super) fn set(self, r: Value<'k, u32>, head: Value<'k, u32>, q_tile: QueryTile<'k>) {
        let QueryTile { begin, rows, offset, kv_start, kv_len, kv_end, first_tile, tiles } = q_tile;
        let values = [r, head, begin, rows, offset, kv_start, kv_len, kv_end, first_tile, tiles];
        self.0.into_iter().zip(values).for_each(|(var, value)| var.set(value));
    }

    /// Request, KV head and query tile, in threads that have set them.
    pub(super) fn get(self) -> (Value<'k, u32>, Value<'k, u32>, QueryTile<'k>) {
        let [r, head, begin, rows, offset, kv_start, kv_len, kv_end, first_tile, tiles] =
            self.0.map(|var| var.get());
        (r, head, QueryTile { begin, rows, offset, kv_start, kv_len, kv_end, first_tile, tiles })
    }
}
