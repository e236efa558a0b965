//! 100,000 random operations of simulated requests on tree and allocator, over three page sizes, compared with the model.
//!
//! Checked after each operation: both structures are consistent, tree and model have the same pages, and each used page
//! has exactly one owner, the tree or a request.

use std::collections::{BTreeMap, BTreeSet};

use tilewright_serve::{
    pages::{PageAllocator, PageId},
    radix::{NodeId, RadixTree},
};

use super::model::PrefixMap;
use crate::generator::Generator;

const NUM_PAGES: usize = 192;
const MAX_REQUEST_PAGES: usize = 12;

/// A running request: the tree owns the first `num_shared` pages, protected by a lock of `path`.
struct Request {
    tokens: Vec<u32>,
    pages: Vec<PageId>,
    num_shared: usize,
    path: Vec<u32>,
}

struct Simulation {
    page_size: usize,
    generator: Generator,
    allocator: PageAllocator,
    tree: RadixTree,
    model: PrefixMap,
    requests: Vec<Request>,
    /// Changes occasionally: few requests leave many evictable pages, many leave none.
    max_requests: usize,
    /// The id of each path that was ever returned and is still in the tree.
    ids: BTreeMap<Vec<u32>, NodeId>,
    stale: Vec<NodeId>,
    /// Number of locks per path, by requests and otherwise.
    locks: BTreeMap<Vec<u32>, usize>,
    /// Number of occurrences of each event.
    event_counts: BTreeMap<&'static str, usize>,
}

impl Simulation {
    fn new(page_size: usize, seed: u64) -> Self {
        Self {
            page_size,
            generator: Generator::new(seed),
            allocator: PageAllocator::new(NUM_PAGES).unwrap(),
            tree: RadixTree::new(page_size).unwrap(),
            model: PrefixMap::new(page_size),
            requests: Vec::new(),
            max_requests: 8,
            ids: BTreeMap::new(),
            stale: Vec::new(),
            locks: BTreeMap::new(),
            event_counts: BTreeMap::new(),
        }
    }

    fn step(&mut self) {
        if self.generator.below(1000) == 0 {
            self.max_requests = 1 + self.generator.below(6) * self.generator.below(16);
        }
        match self.generator.below(16) {
            0..3 => drop(self.lookup()),
            3..6 if self.requests.len() < self.max_requests => self.start(),
            3..8 => self.finish(),
            8..10 => self.commit(),
            10 => self.insert_unmatched(),
            11 => self.insert_invalid(),
            12 => self.lock_random(),
            13..15 => self.unlock_random(),
            _ => {
                let count = self.generator.below(20);
                self.evict(count);
            }
        }
    }

    fn count(&mut self, event: &'static str) {
        *self.event_counts.entry(event).or_default() += 1;
    }

    /// Tokens that often start with a known path; the alphabet is small, so random pages repeat too.
    fn tokens(&mut self) -> Vec<u32> {
        let mut tokens = Vec::new();
        if !self.ids.is_empty() && self.generator.below(4) > 0 {
            let path = self.ids.keys().nth(self.generator.below(self.ids.len())).unwrap();
            tokens = path[..self.generator.below(path.len() + 1)].to_vec();
        }
        let more = self.generator.below(MAX_REQUEST_PAGES * self.page_size - tokens.len() + 1);
        tokens.extend((0..more).map(|_| self.generator.below(3) as u32));
        tokens
    }

    /// Records the id of a path: it must equal the known id or be a new one.
    fn record_id(&mut self, path: &[u32], node: NodeId) {
        assert!(!self.stale.contains(&node), "{node} was stale and identifies a path again");
        let known = *self.ids.entry(path.to_vec()).or_insert(node);
        assert_eq!(known, node, "the id of a path changed");
    }

    fn lookup(&mut self) -> Vec<u32> {
        let tokens = self.tokens();
        let expected = self.model.match_prefix(&tokens);
        let prefix = self.tree.match_prefix(&tokens);
        assert_eq!(prefix.pages, expected);
        assert_eq!(prefix.num_tokens(), expected.len() * self.page_size);
        let path = &tokens[..prefix.num_tokens()];
        if !path.is_empty() && !self.ids.contains_key(path) {
            self.count("match without an id of its own");
        }
        self.record_id(path, prefix.node);
        tokens
    }

    fn lock(&mut self, path: &[u32]) {
        self.tree.lock(self.ids[path]).unwrap();
        self.model.lock(path);
        *self.locks.entry(path.to_vec()).or_default() += 1;
    }

    fn unlock(&mut self, path: &[u32]) {
        self.tree.unlock(self.ids[path]).unwrap();
        self.model.unlock(path);
        *self.locks.get_mut(path).unwrap() -= 1;
    }

    fn evict(&mut self, count: usize) {
        let expected = count.min(self.model.num_evictable());
        let (paths, pages): (Vec<_>, Vec<_>) = self.model.evict(count).into_iter().unzip();
        assert_eq!(self.tree.evict(count), pages);
        assert_eq!(pages.len(), expected);
        self.allocator.free(&pages).unwrap();
        for path in paths {
            if let Some(node) = self.ids.remove(&path) {
                self.stale.push(node);
                self.locks.remove(&path);
            }
        }
        // Keeps the check in `record_id` fast; slots are reused soon or never.
        let excess = self.stale.len().saturating_sub(64);
        self.stale.drain(..excess);
    }

    /// Allocates pages for a request, with eviction if needed.
    fn allocate(&mut self, count: usize) -> Option<Vec<PageId>> {
        let missing = count.saturating_sub(self.allocator.num_free());
        if missing > 0 {
            self.evict(missing);
        }
        let pages = self.allocator.allocate(count);
        self.count(if pages.is_some() { "allocation" } else { "pool exhausted" });
        pages
    }

    fn start(&mut self) {
        let tokens = self.lookup();
        let shared = self.model.match_prefix(&tokens);
        self.tree.match_prefix(&tokens);
        let path = tokens[..shared.len() * self.page_size].to_vec();
        self.lock(&path);
        let num_pages = tokens.len().div_ceil(self.page_size);
        match self.allocate(num_pages - shared.len()) {
            None => self.unlock(&path),
            Some(own) => {
                let num_shared = shared.len();
                self.requests.push(Request { tokens, pages: [shared, own].concat(), num_shared, path });
            }
        }
    }

    /// Inserts into tree and model, and frees the duplicates.
    fn insert(&mut self, tokens: &[u32], pages: &[PageId]) {
        let expected = self.model.insert(tokens, pages);
        let insertion = self.tree.insert(tokens, pages).unwrap();
        assert_eq!(insertion.duplicates, expected);
        self.record_id(tokens, insertion.node);
        self.allocator.free(&insertion.duplicates).unwrap();
        if !expected.is_empty() {
            self.count("duplicates");
        }
    }

    fn take_request(&mut self) -> Option<Request> {
        let num_requests = self.requests.len();
        (num_requests > 0).then(|| self.requests.swap_remove(self.generator.below(num_requests)))
    }

    /// Ends a request: inserts its full pages and frees the partial one.
    fn finish(&mut self) {
        let Some(Request { tokens, pages, path, .. }) = self.take_request() else { return };
        let num_full = tokens.len() / self.page_size;
        self.insert(&tokens[..num_full * self.page_size], &pages[..num_full]);
        self.allocator.free(&pages[num_full..]).unwrap();
        self.unlock(&path);
        self.count("finished request");
    }

    /// Inserts some full pages of a running request, which continues with the tree's pages.
    fn commit(&mut self) {
        let Some(mut request) = self.take_request() else { return };
        let num_full = request.tokens.len() / self.page_size;
        let num_pages = request.num_shared + self.generator.below(num_full - request.num_shared + 1);
        let path = request.tokens[..num_pages * self.page_size].to_vec();
        self.insert(&path, &request.pages[..num_pages]);
        self.lock(&path);
        self.unlock(&request.path);
        let shared = self.tree.match_prefix(&path).pages;
        assert_eq!(shared, self.model.match_prefix(&path));
        request.pages.splice(..num_pages, shared);
        self.requests.push(Request { num_shared: num_pages, path, ..request });
        self.count("commit");
    }

    /// Inserts pages without a preceding match, as if received from another machine.
    fn insert_unmatched(&mut self) {
        let mut tokens = self.tokens();
        tokens.truncate(tokens.len() / self.page_size * self.page_size);
        if let Some(pages) = self.allocate(tokens.len() / self.page_size) {
            self.insert(&tokens, &pages);
        }
    }

    /// Inserts a page that the tree has for other tokens, which fails without effect.
    fn insert_invalid(&mut self) {
        let Some((path, entry)) = self.model.entries.iter().next_back() else { return };
        let existing = (path.clone(), entry.page);
        let mut tokens = self.tokens();
        tokens.resize(self.page_size, 0);
        if tokens != existing.0 {
            let error = self.tree.insert(&tokens, &[existing.1]).unwrap_err();
            let text = format!("pages[0] = {} is in the tree already, for other tokens", existing.1);
            assert_eq!(error.message(), text);
            self.count("refused insertion");
        }
    }

    fn lock_random(&mut self) {
        if !self.stale.is_empty() && self.generator.below(2) == 0 {
            let node = self.stale[self.generator.below(self.stale.len())];
            let error = self.tree.lock(node).unwrap_err().to_string();
            assert_eq!(error, format!("radix.lock: {node} is not, or no longer, in the tree"));
            self.count("refused lock");
        } else if !self.ids.is_empty() {
            let path = self.ids.keys().nth(self.generator.below(self.ids.len())).unwrap().clone();
            self.lock(&path);
        }
    }

    /// Unlocks a path that no request uses, or tries to unlock a node without lock.
    fn unlock_random(&mut self) {
        let Some(at) = self.ids.len().checked_sub(1).map(|last| self.generator.below(last + 1)) else {
            return;
        };
        let (path, &node) = self.ids.iter().nth(at).unwrap();
        let path = path.clone();
        let in_use = self.requests.iter().filter(|request| request.path == path).count();
        match self.locks.get(&path).copied().unwrap_or_default() {
            0 => {
                let error = self.tree.unlock(node).unwrap_err().to_string();
                assert_eq!(error, format!("radix.unlock: {node} is not locked"));
                self.count("refused unlock");
            }
            locks => (in_use..locks).for_each(|_| self.unlock(&path)),
        }
    }

    fn check(&self) {
        self.tree.check_integrity().unwrap();
        self.allocator.check_integrity().unwrap();
        assert_eq!(self.tree.num_pages(), self.model.entries.len());
        assert_eq!(self.tree.num_evictable(), self.model.num_evictable());
        let mut owned: BTreeSet<PageId> = self.model.entries.values().map(|entry| entry.page).collect();
        for request in &self.requests {
            for &page in &request.pages[request.num_shared..] {
                assert!(owned.insert(page), "page {page} has two owners");
            }
        }
        assert_eq!(self.allocator.num_used(), owned.len());
    }

    /// Ends all requests and locks; afterwards all pages must be free.
    fn drain(&mut self) {
        while !self.requests.is_empty() {
            self.finish();
        }
        for (path, count) in self.locks.clone() {
            (0..count).for_each(|_| self.unlock(&path));
        }
        self.check();
        self.evict(usize::MAX);
        self.check();
        assert_eq!((self.tree.num_pages(), self.allocator.num_free()), (0, NUM_PAGES));
    }
}

#[test]
fn the_tree_survives_100_000_random_operations() {
    for page_size in 1..=3 {
        let mut simulation = Simulation::new(page_size, page_size as u64);
        for _ in 0..100_000_usize.div_ceil(3) {
            simulation.step();
            simulation.check();
        }
        simulation.drain();
        assert_eq!(
            simulation.event_counts.len(),
            9,
            "some event never occurred: {:?}",
            simulation.event_counts
        );
        assert!(
            simulation.event_counts.values().all(|&count| count > 50),
            "too few occurrences: {:?}",
            simulation.event_counts
        );
    }
}
