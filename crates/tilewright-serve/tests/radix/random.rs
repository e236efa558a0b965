//! 100,000 random operations of simulated requests on tree and allocator, held against the model.
//!
//! Invariant, checked after each one: both structures are whole, tree and model have the same pages, and every
//! used page of the pool has exactly one owner, the tree or a request.

use std::collections::{BTreeMap, BTreeSet};

use tilewright_serve::{
    pages::{PageAllocator, PageId},
    radix::{NodeId, RadixTree},
};

use crate::{generator::Generator, model::Model};

const NUM_PAGES: usize = 192;
const MAX_PAGES_OF_A_REQUEST: usize = 12;

/// A running request: the first `num_shared` pages are the tree's, kept by a lock of `path`.
struct Request {
    tokens: Vec<u32>,
    pages: Vec<PageId>,
    num_shared: usize,
    path: Vec<u32>,
}

struct World {
    page_size: usize,
    generator: Generator,
    allocator: PageAllocator,
    tree: RadixTree,
    model: Model,
    requests: Vec<Request>,
    /// Changes now and then: few requests leave much to evict, many leave nothing.
    max_requests: usize,
    /// The id of each path that was ever named and is still in the tree.
    ids: BTreeMap<Vec<u32>, NodeId>,
    stale: Vec<NodeId>,
    /// How often each path is locked, by requests and otherwise.
    locks: BTreeMap<Vec<u32>, usize>,
    /// How often each interesting thing happened.
    tally: BTreeMap<&'static str, usize>,
}

impl World {
    fn new(page_size: usize, seed: u64) -> Self {
        Self {
            page_size,
            generator: Generator::new(seed),
            allocator: PageAllocator::new(NUM_PAGES).unwrap(),
            tree: RadixTree::new(page_size).unwrap(),
            model: Model::new(page_size),
            requests: Vec::new(),
            max_requests: 8,
            ids: BTreeMap::new(),
            stale: Vec::new(),
            locks: BTreeMap::new(),
            tally: BTreeMap::new(),
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
            10 => self.bring(),
            11 => self.bring_wrongly(),
            12 => self.lock_something(),
            13..15 => self.unlock_something(),
            _ => {
                let count = self.generator.below(20);
                self.evict(count);
            }
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    /// Tokens that often begin like a path that was named before; the alphabet is so small that even random
    /// pages repeat.
    fn tokens(&mut self) -> Vec<u32> {
        let mut tokens = Vec::new();
        if !self.ids.is_empty() && self.generator.below(4) > 0 {
            let path = self.ids.keys().nth(self.generator.below(self.ids.len())).unwrap();
            tokens = path[..self.generator.below(path.len() + 1)].to_vec();
        }
        let more = self.generator.below(MAX_PAGES_OF_A_REQUEST * self.page_size - tokens.len() + 1);
        tokens.extend((0..more).map(|_| self.generator.below(3) as u32));
        tokens
    }

    /// Notes the id of a path: the same id as ever, or one that was never seen.
    fn name(&mut self, path: &[u32], node: NodeId) {
        assert!(!self.stale.contains(&node), "{node} was stale and names a path again");
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
        self.name(path, prefix.node);
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
        // Keeps the check in `name` fast; slots are reused soon or not at all.
        let forgotten = self.stale.len().saturating_sub(64);
        self.stale.drain(..forgotten);
    }

    /// Pages for a request, at the tree's cost if need be.
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
        self.name(tokens, insertion.node);
        self.allocator.free(&insertion.duplicates).unwrap();
        if !expected.is_empty() {
            self.count("duplicates");
        }
    }

    fn take_request(&mut self) -> Option<Request> {
        let num_requests = self.requests.len();
        (num_requests > 0).then(|| self.requests.swap_remove(self.generator.below(num_requests)))
    }

    /// A request ends: its full pages go to the tree, the last page back to the pool.
    fn finish(&mut self) {
        let Some(Request { tokens, pages, path, .. }) = self.take_request() else { return };
        let num_full = tokens.len() / self.page_size;
        self.insert(&tokens[..num_full * self.page_size], &pages[..num_full]);
        self.allocator.free(&pages[num_full..]).unwrap();
        self.unlock(&path);
        self.count("finished request");
    }

    /// A request gives some of its full pages to the tree and runs on, with the tree's pages for them.
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

    /// Pages arrive without a match before, as from another machine.
    fn bring(&mut self) {
        let mut tokens = self.tokens();
        tokens.truncate(tokens.len() / self.page_size * self.page_size);
        if let Some(pages) = self.allocate(tokens.len() / self.page_size) {
            self.insert(&tokens, &pages);
        }
    }

    /// A page that the tree has elsewhere: refused, and nothing changes.
    fn bring_wrongly(&mut self) {
        let Some((path, entry)) = self.model.entries.iter().next_back() else { return };
        let wrong = (path.clone(), entry.page);
        let mut tokens = self.tokens();
        tokens.resize(self.page_size, 0);
        if tokens != wrong.0 {
            let error = self.tree.insert(&tokens, &[wrong.1]).unwrap_err();
            let text = format!("pages[0] = {} is in the tree already, for other tokens", wrong.1);
            assert_eq!(error.message(), text);
            self.count("refused insertion");
        }
    }

    fn lock_something(&mut self) {
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

    /// Unlocks a path that no request holds, or tries a node that is not locked.
    fn unlock_something(&mut self) {
        let Some(at) = self.ids.len().checked_sub(1).map(|last| self.generator.below(last + 1)) else {
            return;
        };
        let (path, &node) = self.ids.iter().nth(at).unwrap();
        let path = path.clone();
        let held = self.requests.iter().filter(|request| request.path == path).count();
        match self.locks.get(&path).copied().unwrap_or_default() {
            0 => {
                let error = self.tree.unlock(node).unwrap_err().to_string();
                assert_eq!(error, format!("radix.unlock: {node} is not locked"));
                self.count("refused unlock");
            }
            locks => (held..locks).for_each(|_| self.unlock(&path)),
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

    /// Ends everything; afterwards all pages must be free.
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
        let mut world = World::new(page_size, page_size as u64);
        for _ in 0..100_000 {
            world.step();
            world.check();
        }
        world.drain();
        assert_eq!(world.tally.len(), 9, "something never happened: {:?}", world.tally);
        assert!(world.tally.values().all(|&count| count > 500), "too few to mean much: {:?}", world.tally);
    }
}
