//! The pages of the KV pool as requests hold them: the allocator and the radix tree, kept in step.
//!
//! Invariant: every used page belongs to the tree or to exactly one [`Holding`]. Of a holding's pages the first
//! `shared` are the tree's, locked; the rest are its own, and only those are written.

use crate::{
    pages::{PageAllocator, PageId},
    radix::{NodeId, RadixTree},
};
use std::collections::HashSet;
use tilewright::{Result, ensure};

/// The pages of one request, in the order of its tokens.
#[derive(Debug, Default)]
pub(crate) struct Holding {
    pub(crate) pages: Vec<PageId>,
    shared: usize,
    node: Option<NodeId>,
}

impl Holding {
    /// Pages that it reads from the tree.
    pub(crate) fn shared(&self) -> usize {
        self.shared
    }
}

/// A second holding of the same tokens, which reads the first one's shared pages.
#[derive(Debug)]
pub(crate) struct Forked {
    pub(crate) holding: Holding,
    /// Pages to copy before anything is computed, (from, to): both holdings go on filling the same page.
    pub(crate) copies: Vec<(PageId, PageId)>,
}

/// All pages of an engine.
#[derive(Debug)]
pub(crate) struct Pool {
    allocator: PageAllocator,
    radix: RadixTree,
    page_size: usize,
    prefix_reuse: bool,
}

impl Pool {
    pub(crate) fn new(num_pages: usize, page_size: usize, prefix_reuse: bool) -> Result<Self> {
        let (allocator, radix) = (PageAllocator::new(num_pages)?, RadixTree::new(page_size)?);
        Ok(Self { allocator, radix, page_size, prefix_reuse })
    }

    /// Pages that hold `tokens` tokens.
    pub(crate) fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size)
    }

    /// Tokens that fit in `pages` pages.
    pub(crate) fn tokens_in(&self, pages: usize) -> usize {
        pages * self.page_size
    }

    /// Pages that a request could get: free ones, and those of the tree that nobody reads.
    pub(crate) fn available(&self) -> usize {
        self.allocator.num_free() + self.radix.num_evictable()
    }

    /// Pages in use by requests and by the tree.
    pub(crate) fn used(&self) -> usize {
        self.allocator.num_used()
    }

    /// All pages.
    pub(crate) fn num_pages(&self) -> usize {
        self.allocator.num_pages()
    }

    /// Starts a holding with the longest prefix of `tokens` that the tree has, locked.
    pub(crate) fn start(&mut self, tokens: &[u32]) -> Result<Holding> {
        if !self.prefix_reuse {
            return Ok(Holding::default());
        }
        let prefix = self.radix.match_prefix(tokens);
        self.radix.lock(prefix.node)?;
        Ok(Holding { shared: prefix.pages.len(), pages: prefix.pages, node: Some(prefix.node) })
    }

    /// Grows `holding` until it has room for `tokens` tokens, evicting what nobody reads; `false`, and nothing has
    /// changed, when there are not enough pages.
    pub(crate) fn grow(&mut self, holding: &mut Holding, tokens: usize) -> Result<bool> {
        let count = self.pages_for(tokens).saturating_sub(holding.pages.len());
        if count > self.available() {
            return Ok(false);
        }
        if count > self.allocator.num_free() {
            let evicted = self.radix.evict(count - self.allocator.num_free());
            self.allocator.free(&evicted)?;
        }
        let pages = self.allocator.allocate(count);
        holding.pages.extend(pages.iter().flatten());
        Ok(pages.is_some())
    }

    /// Gives the whole pages of `computed`, the tokens whose KV is in `holding`, to the tree for others to read.
    pub(crate) fn publish(&mut self, holding: &mut Holding, computed: &[u32]) -> Result<()> {
        let whole = computed.len() / self.page_size;
        if !self.prefix_reuse || whole <= holding.shared {
            return Ok(());
        }
        let tokens = &computed[..whole * self.page_size];
        let insertion = self.radix.insert(tokens, &holding.pages[..whole])?;
        if !insertion.duplicates.is_empty() {
            // another request was first: its pages hold the same, so these are not needed twice
            let theirs = self.radix.match_prefix(tokens).pages;
            holding.pages[..whole].copy_from_slice(&theirs);
            self.allocator.free(&insertion.duplicates)?;
        }
        self.radix.lock(insertion.node)?;
        if let Some(old) = holding.node.replace(insertion.node) {
            self.radix.unlock(old)?;
        }
        holding.shared = whole;
        Ok(())
    }

    /// Ends a holding: whole pages of `computed` go to the tree, the rest become free.
    pub(crate) fn release(&mut self, mut holding: Holding, computed: &[u32]) -> Result<()> {
        self.publish(&mut holding, computed)?;
        if let Some(node) = holding.node {
            self.radix.unlock(node)?;
        }
        self.allocator.free(&holding.pages[holding.shared..])
    }

    /// A second holding of the tokens of `holding`; `None` when there are not enough pages.
    pub(crate) fn fork(&mut self, holding: &Holding) -> Result<Option<Forked>> {
        let mut fork = Holding { pages: holding.pages[..holding.shared].to_vec(), ..Holding::default() };
        if let Some(node) = holding.node {
            self.radix.lock(node)?;
            (fork.node, fork.shared) = (Some(node), holding.shared);
        }
        if !self.grow(&mut fork, holding.pages.len() * self.page_size)? {
            self.release(fork, &[])?;
            return Ok(None);
        }
        let own = fork.shared..;
        let copies =
            holding.pages[own.clone()].iter().copied().zip(fork.pages[own].iter().copied()).collect();
        Ok(Some(Forked { holding: fork, copies }))
    }

    /// Checks the allocator, the tree, that `holdings` and the tree own every used page once, and that the tree's
    /// locks keep the pages which `holdings` read and no others.
    pub(crate) fn check_integrity<'a>(&self, holdings: impl Iterator<Item = &'a Holding>) -> Result<()> {
        const OPERATOR: &str = "pool.check_integrity";
        self.allocator.check_integrity()?;
        self.radix.check_integrity()?;
        let (mut own, mut read) = (HashSet::new(), HashSet::<PageId>::new());
        for holding in holdings {
            let (shared, rest) = holding.pages.split_at(holding.shared);
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
