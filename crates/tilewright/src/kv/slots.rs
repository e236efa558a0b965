//! Slot mapping of new tokens: a unique page and slot per token.

use super::page_table::CheckedPageTable;
use crate::{
    Error, Opaque, Result,
    kv::{AppendPlan, PageTable},
};
use std::collections::BTreeMap;

/// Request index of a skipped token: padding of a fixed-size batch.
const SKIPPED: i32 = -1;

/// Cache location of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Index of the new token.
    pub token: usize,
    /// Page id in the pool.
    pub page: usize,
    /// Slot in the page.
    pub slot: usize,
}

/// Slot mapping of one tensor's tokens, ordered by page and slot, without skipped tokens.
#[derive(Debug, Clone, Copy)]
pub struct Slots<'a> {
    token_slots: &'a TokenSlots,
    prepared: Option<&'a Opaque>,
}

/// The new tokens of one page.
#[derive(Debug, Clone, Copy)]
pub struct PageSlots<'a> {
    /// Page id in the pool.
    pub page: usize,
    /// Its new tokens, ordered by slot.
    pub slots: &'a [Slot],
    /// Number of slots in use, including the new tokens; later slots hold garbage.
    pub filled: usize,
}

impl<'a> Slots<'a> {
    pub(crate) fn new(token_slots: &'a TokenSlots) -> Self {
        Self { token_slots, prepared: None }
    }

    /// The slots of a plan.
    pub(crate) fn of_plan(plan: &'a AppendPlan) -> Self {
        Self { token_slots: plan.token_slots(), prepared: plan.prepared() }
    }

    /// The result of the backend's [`prepare_append`](crate::Backend::prepare_append), if the slots are those of an
    /// [`AppendPlan`](super::AppendPlan).
    pub fn prepared(&self) -> Option<&'a Opaque> {
        self.prepared
    }

    /// All tokens, ordered by page and slot.
    pub fn all(&self) -> &'a [Slot] {
        &self.token_slots.slots
    }

    /// The tokens, grouped by page.
    pub fn pages(&self) -> impl Iterator<Item = PageSlots<'a>> + use<'a> {
        self.token_slots.by_page()
    }
}

/// Validated slots of all tokens of a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TokenSlots {
    pub(crate) slots: Vec<Slot>,
    /// Slots in use per page with new tokens.
    filled: BTreeMap<usize, usize>,
    /// Maximum page id of the table, -1 if it has none.
    max_page: i32,
}

impl TokenSlots {
    /// Looks up every token in the page table. `num_pages` is that of the cache, if already known.
    ///
    /// # Errors
    /// When a request, position or page does not exist, or two tokens map to one slot.
    pub(crate) fn look_up(
        operator: &'static str,
        table: &PageTable<'_>,
        batch_indices: &[i32],
        positions: &[i32],
        num_pages: Option<usize>,
    ) -> Result<Self> {
        let pages = table.resolve(operator)?;
        check_pages(operator, pages.max_page, num_pages.unwrap_or(usize::MAX))?;
        let tokens = batch_indices.iter().zip(positions).enumerate();
        let used = tokens.filter(|(_, (request, _))| **request != SKIPPED);
        let mut slots = used
            .map(|(token, (&request, &position))| {
                let (page, slot) = locate(&pages, table.page_size, request, position)
                    .map_err(|text| Error::new(operator, format!("token {token}: {text}")))?;
                Ok(Slot { token, page, slot })
            })
            .collect::<Result<Vec<_>>>()?;
        sort(operator, &mut slots)?;
        let filled = filled(&pages, table.page_size, &slots);
        Ok(Self { slots, filled, max_page: pages.max_page })
    }

    /// The slots of a slot mapping: `page * page_size + slot` of each token, -1 to skip it.
    ///
    /// # Errors
    /// When a slot does not exist, or two tokens map to one slot.
    pub(crate) fn of_mapping(
        operator: &'static str,
        slot_mapping: &[i64],
        num_pages: usize,
        page_size: usize,
    ) -> Result<Self> {
        let count = num_pages.saturating_mul(page_size);
        let tokens = slot_mapping.iter().enumerate();
        let used = tokens.filter(|(_, number)| **number != i64::from(SKIPPED));
        let mut slots = used
            .map(|(token, &number)| {
                let number = usize::try_from(number).ok().filter(|&at| at < count).ok_or_else(|| {
                    let text = format!(
                        "token {token}: slot = {number} is not in 0..{count}, nor -1 to skip the token"
                    );
                    Error::new(operator, text)
                })?;
                Ok(Slot { token, page: number / page_size, slot: number % page_size })
            })
            .collect::<Result<Vec<_>>>()?;
        sort(operator, &mut slots)?;
        let filled = slots.iter().map(|slot| (slot.page, page_size)).collect();
        let max_page = slots.last().map_or(-1, |slot| slot.page as i32);
        Ok(Self { slots, filled, max_page })
    }

    /// Checks that a cache has all pages of the table.
    pub(crate) fn check_pages(&self, operator: &'static str, num_pages: usize) -> Result<()> {
        check_pages(operator, self.max_page, num_pages)
    }

    /// The tokens, grouped by page.
    pub(crate) fn by_page(&self) -> impl Iterator<Item = PageSlots<'_>> {
        let pages = self.slots.chunk_by(|a, b| a.page == b.page);
        pages.map(|slots| {
            let page = slots[0].page;
            PageSlots { page, slots, filled: self.filled[&page] }
        })
    }
}

/// Sorts by page and slot, and rejects two tokens with one slot.
fn sort(operator: &'static str, slots: &mut [Slot]) -> Result<()> {
    slots.sort_unstable_by_key(|slot| (slot.page, slot.slot, slot.token));
    for pair in slots.windows(2) {
        let [first, second] = [pair[0], pair[1]];
        crate::ensure!(
            (first.page, first.slot) != (second.page, second.slot),
            operator,
            "tokens {} and {} both go to slot {} of page {}",
            first.token,
            second.token,
            first.slot,
            first.page
        );
    }
    Ok(())
}

fn check_pages(operator: &'static str, max_page: i32, num_pages: usize) -> Result<()> {
    crate::ensure!(
        max_page < 0 || (max_page as usize) < num_pages,
        operator,
        "page = {max_page} is not in 0..{num_pages}, the pages of the cache"
    );
    Ok(())
}

/// Page and slot of a request's position.
fn locate(
    pages: &CheckedPageTable,
    page_size: usize,
    request: i32,
    position: i32,
) -> std::result::Result<(usize, usize), String> {
    let count = pages.ranges.len();
    let Some(r) = usize::try_from(request).ok().filter(|&r| r < count) else {
        return Err(format!("batch_index = {request} is not in 0..{count}, nor -1 to skip the token"));
    };
    let kv_len = pages.kv_lens[r];
    let Some(at) = usize::try_from(position).ok().filter(|&at| at < kv_len) else {
        return Err(format!("position = {position} is not in 0..{kv_len} of request {request}"));
    };
    Ok((pages.indices[pages.ranges[r].start + at / page_size] as usize, at % page_size))
}

/// Slots in use per page of `slots`; the maximum over requests that share the page.
fn filled(pages: &CheckedPageTable, page_size: usize, slots: &[Slot]) -> BTreeMap<usize, usize> {
    let mut filled: BTreeMap<usize, usize> = slots.iter().map(|slot| (slot.page, 0)).collect();
    for (range, kv_len) in pages.ranges.iter().zip(&pages.kv_lens) {
        for (index, page) in pages.indices[range.clone()].iter().enumerate() {
            if let Some(in_use) = filled.get_mut(&(*page as usize)) {
                *in_use = (*in_use).max(page_size.min(kv_len - index * page_size));
            }
        }
    }
    filled
}
