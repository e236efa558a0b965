//! A naive model of the radix tree: a map from every prefix in full pages to its last page.
//!
//! Invariant: with a path, every shorter path is in the map. There are no nodes, edges or splits.

use std::{cmp::Reverse, collections::BTreeMap};

use tilewright_serve::pages::PageId;

pub(crate) struct PrefixMap {
    page_size: usize,
    clock: u64,
    pub(crate) entries: BTreeMap<Vec<u32>, Entry>,
}

pub(crate) struct Entry {
    pub(crate) page: PageId,
    used_at: u64,
    locks: usize,
}

impl PrefixMap {
    pub(crate) fn new(page_size: usize) -> Self {
        Self { page_size, clock: 0, entries: BTreeMap::new() }
    }

    /// The pages of the longest prefix; updates their access time.
    pub(crate) fn match_prefix(&mut self, tokens: &[u32]) -> Vec<PageId> {
        self.clock += 1;
        let mut pages = Vec::new();
        for path in prefixes(tokens, self.page_size) {
            let Some(entry) = self.entries.get_mut(path) else { break };
            entry.used_at = self.clock;
            pages.push(entry.page);
        }
        pages
    }

    /// Inserts `pages` and returns the duplicates.
    pub(crate) fn insert(&mut self, tokens: &[u32], pages: &[PageId]) -> Vec<PageId> {
        let known = self.match_prefix(tokens);
        for (path, &page) in prefixes(tokens, self.page_size).zip(pages).skip(known.len()) {
            self.entries.insert(path.to_vec(), Entry { page, used_at: self.clock, locks: 0 });
        }
        known.iter().zip(pages).filter(|(known, page)| known != page).map(|(_, &page)| page).collect()
    }

    pub(crate) fn lock(&mut self, path: &[u32]) {
        for prefix in prefixes(path, self.page_size) {
            self.entries.get_mut(prefix).unwrap().locks += 1;
        }
    }

    pub(crate) fn unlock(&mut self, path: &[u32]) {
        for prefix in prefixes(path, self.page_size) {
            self.entries.get_mut(prefix).unwrap().locks -= 1;
        }
    }

    /// Removes the `count` oldest unlocked pages and returns them with their paths. Equally old pages are on one path;
    /// the deepest is removed first.
    pub(crate) fn evict(&mut self, count: usize) -> Vec<(Vec<u32>, PageId)> {
        let unlocked = self.entries.iter().filter(|(_, entry)| entry.locks == 0);
        let mut order: Vec<_> =
            unlocked.map(|(path, entry)| (entry.used_at, Reverse(path.len()), path.clone())).collect();
        order.sort();
        order.truncate(count);
        let remove = |(_, _, path): (_, _, Vec<u32>)| {
            let page = self.entries.remove(&path).unwrap().page;
            (path, page)
        };
        order.into_iter().map(remove).collect()
    }

    pub(crate) fn num_evictable(&self) -> usize {
        self.entries.values().filter(|entry| entry.locks == 0).count()
    }
}

/// The prefixes of `tokens` in full pages, shortest first.
fn prefixes(tokens: &[u32], page_size: usize) -> impl Iterator<Item = &[u32]> {
    (1..=tokens.len() / page_size).map(move |num_pages| &tokens[..num_pages * page_size])
}
