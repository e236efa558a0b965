//! Page ownership: the allocator and the radix tree, kept consistent.
//!
//! Invariant: the tree or exactly one [`RequestPages`] owns each used page. The first `shared` pages of a request belong
//! to the tree and are locked; the request owns the rest and writes only those.

use crate::{
    pages::{PageAllocator, PageId},
    radix::{NodeId, RadixTree},
};
use std::collections::HashSet;
use tilewright::{Result, ensure};

/// The pages of one request, in token order.
#[derive(Debug, Default)]
pub(crate) struct RequestPages {
    pub(crate) ids: Vec<PageId>,
    shared: usize,
    node: Option<NodeId>,
}

impl RequestPages {
    /// Number of pages owned by the tree.
    pub(crate) fn shared(&self) -> usize {
        self.shared
    }
}

/// The pages of a fork: same tokens, same shared pages, own copies of the rest.
#[derive(Debug)]
pub(crate) struct ForkPages {
    pub(crate) pages: RequestPages,
    /// Pages to copy before the next step, (from, to): both requests continue to fill them.
    pub(crate) copies: Vec<(PageId, PageId)>,
}

/// The page allocator and the radix tree of an engine.
#[derive(Debug)]
pub(crate) struct PagePool {
    allocator: PageAllocator,
    radix: RadixTree,
    page_size: usize,
    prefix_reuse: bool,
}

impl PagePool {
    pub(crate) fn new(num_pages: usize, page_size: usize, prefix_reuse: bool) -> Result<Self> {
        let (allocator, radix) = (PageAllocator::new(num_pages)?, RadixTree::new(page_size)?);
        Ok(Self { allocator, radix, page_size, prefix_reuse })
    }

    /// Pages needed for `tokens` tokens.
    pub(crate) fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size)
    }

    /// Token capacity of `pages` pages.
    pub(crate) fn tokens_in(&self, pages: usize) -> usize {
        pages * self.page_size
    }

    /// Free pages and evictable pages of the tree.
    pub(crate) fn available(&self) -> usize {
        self.allocator.num_free() + self.radix.num_evictable()
    }

    /// Pages in use by requests and by the tree.
    pub(crate) fn used(&self) -> usize {
        self.allocator.num_used()
    }

    /// The size of the pool.
    pub(crate) fn num_pages(&self) -> usize {
        self.allocator.num_pages()
    }

    /// Locks the longest prefix of `tokens` in the tree and returns its pages.
    pub(crate) fn acquire(&mut self, tokens: &[u32]) -> Result<RequestPages> {
        if !self.prefix_reuse {
            return Ok(RequestPages::default());
        }
        let prefix = self.radix.match_prefix(tokens);
        self.radix.lock(prefix.node)?;
        Ok(RequestPages { shared: prefix.pages.len(), ids: prefix.pages, node: Some(prefix.node) })
    }

    /// Allocates pages until `pages` has capacity for `tokens` tokens; evicts unlocked pages if needed. With too few
    /// pages it returns `false` and changes nothing.
    pub(crate) fn grow(&mut self, pages: &mut RequestPages, tokens: usize) -> Result<bool> {
        let count = self.pages_for(tokens).saturating_sub(pages.ids.len());
        if count > self.available() {
            return Ok(false);
        }
        if count > self.allocator.num_free() {
            let evicted = self.radix.evict(count - self.allocator.num_free());
            self.allocator.free(&evicted)?;
        }
        let new = self.allocator.allocate(count);
        pages.ids.extend(new.iter().flatten());
        Ok(new.is_some())
    }

    /// Inserts the full pages of `computed`, the tokens with KV in `pages`, into the tree.
    pub(crate) fn publish(&mut self, pages: &mut RequestPages, computed: &[u32]) -> Result<()> {
        let full = computed.len() / self.page_size;
        if !self.prefix_reuse || full <= pages.shared {
            return Ok(());
        }
        let tokens = &computed[..full * self.page_size];
        let insertion = self.radix.insert(tokens, &pages.ids[..full])?;
        if !insertion.duplicates.is_empty() {
            // another request inserted the same tokens first: use its pages and free these
            let existing = self.radix.match_prefix(tokens).pages;
            pages.ids[..full].copy_from_slice(&existing);
            self.allocator.free(&insertion.duplicates)?;
        }
        self.radix.lock(insertion.node)?;
        if let Some(old) = pages.node.replace(insertion.node) {
            self.radix.unlock(old)?;
        }
        pages.shared = full;
        Ok(())
    }

    /// Moves the full pages of `computed` to the tree and frees the rest.
    pub(crate) fn release(&mut self, mut pages: RequestPages, computed: &[u32]) -> Result<()> {
        self.publish(&mut pages, computed)?;
        if let Some(node) = pages.node {
            self.radix.unlock(node)?;
        }
        self.allocator.free(&pages.ids[pages.shared..])
    }

    /// Pages for a second request with the same tokens; `None` when too few are available.
    pub(crate) fn fork(&mut self, pages: &RequestPages) -> Result<Option<ForkPages>> {
        let mut fork = RequestPages { ids: pages.ids[..pages.shared].to_vec(), ..RequestPages::default() };
        if let Some(node) = pages.node {
            self.radix.lock(node)?;
            (fork.node, fork.shared) = (Some(node), pages.shared);
        }
        if !self.grow(&mut fork, pages.ids.len() * self.page_size)? {
            self.release(fork, &[])?;
            return Ok(None);
        }
        let own = fork.shared..;
        let copies = pages.ids[own.clone()].iter().copied().zip(fork.ids[own].iter().copied()).collect();
        Ok(Some(ForkPages { pages: fork, copies }))
    }

    /// Checks the allocator and the tree, that each used page has one owner, and that exactly the pages shared by
    /// `requests` are locked.
    pub(crate) fn check_integrity<'a>(&self, requests: impl Iterator<Item = &'a RequestPages>) -> Result<()> {
        const OPERATOR: &str = "pool.check_integrity";
        self.allocator.check_integrity()?;
        self.radix.check_integrity()?;
        let (mut own, mut read) = (HashSet::new(), HashSet::<PageId>::new());
        for pages in requests {
            let (shared, rest) = pages.ids.split_at(pages.shared);
            read.extend(shared);
            let twice = rest.iter().find(|&&page| !own.insert(page));
            ensure!(twice.is_none(), OPERATOR, "page {} has two owners", twice.copied().unwrap_or_default());
        }
        let (own, tree, used) = (own.len(), self.radix.num_pages(), self.allocator.num_used());
        ensure!(
            own + tree == used,
            OPERATOR,
            "requests own {own} pages and the tree {tree}, but {used} are in use"
        );
        let (read, locked) = (read.len(), tree - self.radix.num_evictable());
        ensure!(read == locked, OPERATOR, "requests read {read} pages of the tree, but {locked} are locked");
        Ok(())
    }
}
