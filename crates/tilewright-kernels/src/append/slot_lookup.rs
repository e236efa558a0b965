//! The slot of each new token, from the arrays of a [`SlotMapping`](super::SlotMapping).

use super::{SlotMapping, SlotMappingKind, SlotTableRegs};
use crate::params::Param;
use tilewright_ptx::{Arg, Builder, Global, Value};

/// The slot mapping in registers.
#[derive(Debug, Clone, Copy)]
pub enum SlotLookup<'k> {
    Slots(Global<'k, u32>),
    Unchecked {
        table: SlotTableRegs<'k>,
        num_requests: Value<'k, u32>,
        num_indices: Value<'k, u32>,
        num_pages: Value<'k, u32>,
    },
    Numbers {
        /// The low and the high word of each number.
        numbers: Global<'k, u32>,
        page_size: Value<'k, u32>,
        num_slots: Value<'k, u32>,
    },
}

impl Param for SlotMapping {
    type Host = Self;
    type Regs<'k> = SlotLookup<'k>;
    type Config = SlotMappingKind;

    #[track_caller]
    fn declare<'k>(k: &'k Builder, _: &str, kind: SlotMappingKind) -> SlotLookup<'k> {
        match kind {
            SlotMappingKind::Slots => SlotLookup::Slots(k.global("slots")),
            SlotMappingKind::Unchecked => SlotLookup::Unchecked {
                table: SlotTableRegs::declare(k, ()),
                num_requests: k.param("num_requests"),
                num_indices: k.param("num_indices"),
                num_pages: k.param("num_pages"),
            },
            SlotMappingKind::Numbers => SlotLookup::Numbers {
                numbers: k.global("numbers"),
                page_size: k.param("page_size"),
                num_slots: k.param("num_slots"),
            },
        }
    }

    fn push(host: &Self, _: SlotMappingKind, args: &mut Vec<Arg>) {
        args.extend(match *host {
            Self::Slots { slots, .. } => vec![Arg::U64(slots)],
            Self::Unchecked { table, num_requests, num_indices, num_pages, .. } => {
                [table.args(()), [num_requests, num_indices, num_pages].map(Arg::U32).to_vec()].concat()
            }
            Self::Numbers { numbers, page_size, num_slots, .. } => {
                vec![Arg::U64(numbers), Arg::U32(page_size), Arg::U32(num_slots)]
            }
        });
    }
}

impl<'k> SlotLookup<'k> {
    #[track_caller]
    pub(super) fn token(&self, index: Value<'k, u32>) -> Value<'k, u32> {
        match self {
            Self::Slots(slots) => slots.at(index * 3).load(),
            _ => index,
        }
    }

    /// Calls `body` with the page and slot of entry `index`, unless the token is skipped.
    #[track_caller]
    pub(crate) fn find(
        &self,
        k: &'k Builder,
        index: Value<'k, u32>,
        body: impl FnOnce(Value<'k, u32>, Value<'k, u32>),
    ) {
        match *self {
            Self::Slots(slots) => {
                let at = slots.at(index * 3);
                body(at.plus(1).load(), at.plus(2).load());
            }
            Self::Unchecked { table, num_requests, num_indices, num_pages } => {
                let SlotTableRegs { batch_indices, positions, indptr, indices, page_size } = table;
                // negative numbers compare above every bound
                let request = batch_indices.at(index).load().reinterpret::<u32>();
                k.when(request.lt(num_requests), || {
                    let (position, bounds) = (positions.at(index).load(), indptr.at(request));
                    let (begin, end) = (bounds.load(), bounds.plus(1).load());
                    let number = position / page_size;
                    let in_request = begin.le(end) & end.le(num_indices) & number.lt(end - begin);
                    k.when(in_request, || {
                        let page = indices.at(begin + number).load().named("page");
                        k.when(page.lt(num_pages), || body(page, (position % page_size).named("slot")));
                    });
                });
            }
            Self::Numbers { numbers, page_size, num_slots } => {
                let words = numbers.at(index * 2);
                let (number, high) = (words.load(), words.plus(1).load());
                k.when(high.eq(0) & number.lt(num_slots), || {
                    body((number / page_size).named("page"), (number % page_size).named("slot"));
                });
            }
        }
    }
}
