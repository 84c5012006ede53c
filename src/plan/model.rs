//! The model of any family, of sizes: its weights on one rank, and one forward over a micro-batch. Written as
//! `src/model/{decoder,block,feed_forward,head}.rs` are, value by value.

use std::cell::RefCell;
use std::rc::Rc;

use guildhall_tensor::{Cause, Dtype, Part as Segment};

use super::attention::{Attention, Linear, product};
use super::books::{Books, Part, When};
use super::layout::{Load, Task};
use super::moe::Moe;
use super::moves::Stream;
use super::residency::Residency;
use super::sketch::{Array, Gradient};
use super::tape::Tape;
use super::var::Var;
use crate::model::{NormPlace, Positions};
use crate::moe::Activation;
use crate::parallel::Axis;

/// One weight on one rank.
#[derive(Clone, Debug)]
pub(super) struct Weight {
    pub(super) value: Array,
    pub(super) gradient: Gradient,
    /// The axis over which its gradient is summed and its state may be sharded.
    pub(super) holders: Axis,
    /// What is always here of a weight that is whole only at times.
    _share: Option<Array>,
}

/// Makes weights, in the order in which the model visits them.
pub(super) struct Builder<'a> {
    pub(super) task: &'a Task,
    pub(super) rank: usize,
    books: Rc<Books>,
    weights: RefCell<Vec<Weight>>,
}

impl Builder<'_> {
    pub(super) fn weight(&self, size: (u64, u64), dtype: Dtype, holders: Axis) -> Weight {
        let group = self.task.group(holders, self.rank);
        let (value, share) = match self.task.layout.zero {
            3 => {
                let share = (1, group.share(size.0 * size.1));
                let share = Array::new(&self.books, Cause::Parameters, share, dtype);
                (Array::elsewhere(&self.books, size, dtype), Some(share))
            }
            _ => (Array::new(&self.books, Cause::Parameters, size, dtype), None),
        };
        let gradient = Gradient::new(&self.books, size, self.task.sizes.gradient_of(dtype));
        let weight = Weight { value, gradient, holders, _share: share };
        self.weights.borrow_mut().push(weight.clone());
        weight
    }

    /// The weights made since there were `before` become a unit that is made whole for its turn, and `also`.
    fn unit(&self, residency: &Residency, before: usize, also: Option<&Weight>) {
        if self.task.layout.zero == 3 {
            let made: Vec<Weight> = self.weights.borrow()[before..].iter().chain(also).cloned().collect();
            residency.add(&self.books, &made, |weight| self.task.group(weight.holders, self.rank));
        }
    }

    fn made(&self) -> usize {
        self.weights.borrow().len()
    }

    /// Of a tensor group.
    pub(super) fn ranks(&self) -> u64 {
        self.task.group(Axis::Tensor, self.rank).size
    }

    pub(super) fn cut(&self, size: u64) -> u64 {
        self.task.group(Axis::Tensor, self.rank).share(size)
    }

    /// A weight that every rank of a tensor group has, of which some see other tokens than others if `partial`.
    pub(super) fn common(&self, size: (u64, u64), partial: bool) -> Weight {
        let holders = if partial && self.task.layout.sequence { Axis::World } else { Axis::Data };
        self.weight(size, self.task.sizes.dtype, holders)
    }
}

pub(super) fn on(tape: &Tape, weight: &Weight) -> Var {
    tape.parameter(&weight.value, &weight.gradient)
}

struct Norm {
    weight: Weight,
    bias: Option<Weight>,
}

impl Norm {
    fn new(builder: &Builder, partial: bool) -> Norm {
        let sizes = &builder.task.sizes;
        let vector = || builder.common((1, sizes.model.d_model as u64), partial);
        let weight = vector();
        Norm { weight, bias: (sizes.model.family != crate::model::Family::Mixtral).then(vector) }
    }

    fn forward(&self, x: &Var) -> Var {
        let weight = on(&x.tape, &self.weight);
        x.norm(&weight, self.bias.as_ref().map(|bias| on(&x.tape, bias)).as_ref())
    }
}

enum FeedForward {
    Dense(Box<[Linear; 2]>),
    Moe(Box<Moe>),
}

struct Block {
    index: usize,
    norms: [Norm; 2],
    attention: Attention,
    feed_forward: FeedForward,
}

/// The weights of one rank.
pub(super) struct Model {
    task: Task,
    rank: usize,
    load: Load,
    tokens: Weight,
    positions: Option<Weight>,
    embedding_norm: Option<Norm>,
    blocks: Vec<Block>,
    norm: Option<Norm>,
    transform: Option<(Linear, Norm)>,
    head: Option<Weight>,
    head_bias: Option<Weight>,
    residency: Residency,
}

/// What a block gives besides its value: what a MoE layer says, alive until the loss is made of it.
type Said = Option<super::moe::Said>;

impl Model {
    /// The model, and its weights in visiting order.
    pub(super) fn new(books: &Rc<Books>, task: &Task, rank: usize, load: &Load) -> (Rc<Model>, Vec<Weight>) {
        let builder = Builder { task, rank, books: books.clone(), weights: RefCell::default() };
        let (sizes, model) = (&task.sizes, &task.sizes.model);
        let (d, rows) = (model.d_model as u64, builder.cut(model.vocab as u64));
        let learned = model.family.positions() == Positions::Learned;
        let before = sizes.norms() == NormPlace::Before;
        let masked = !model.family.is_causal();
        let tokens = builder.common((rows, d), false);
        let positions = learned.then(|| builder.common((model.seq as u64, d), true));
        let embedding_norm = (learned && !before).then(|| Norm::new(&builder, true));
        let residency = Residency::default();
        builder.unit(&residency, 0, None);
        let block = |index| {
            let made = builder.made();
            let block = Block::new(&builder, index);
            builder.unit(&residency, made, None);
            block
        };
        let blocks = (0..model.layers).map(block).collect();
        let made = builder.made();
        let norm = before.then(|| Norm::new(&builder, true));
        let transform = masked.then(|| (Linear::of_outputs(&builder, (d, d), true), Norm::new(&builder, false)));
        let head = (!model.tie_embeddings).then(|| builder.common((rows, d), false));
        let head_bias = masked.then(|| builder.common((1, rows), false));
        builder.unit(&residency, made, model.tie_embeddings.then_some(&tokens));
        let (task, load) = (task.clone(), load.clone());
        let model = Model {
            task,
            rank,
            load,
            tokens,
            positions,
            embedding_norm,
            blocks,
            norm,
            transform,
            head,
            head_bias,
            residency,
        };
        (Rc::new(model), builder.weights.into_inner())
    }

    /// The loss of a micro-batch, of whose tokens `predicted` go through a masked model's head.
    pub(super) fn loss(self: &Rc<Model>, tape: &Tape, predicted: u64) -> Var {
        let group = self.task.group(Axis::Tensor, self.rank);
        let stream = Stream { tokens: self.task.tokens(self.rank), group, split: self.task.layout.sequence };
        let (hidden, said) = self.hidden(tape, &stream);
        let head = |hidden: Var| {
            let hidden = self.norm.as_ref().map_or(hidden.clone(), |norm| norm.forward(&hidden));
            self.head_loss(&hidden, &stream, predicted)
        };
        tape.books().part.set(Part::Head);
        let mut loss = self.residency.within(1 + self.blocks.len(), tape, || head(hidden));
        let moe = self.task.sizes.moe.as_ref();
        if let Some(moe) = moe.filter(|moe| moe.joins_layers()) {
            self.task.group(Axis::Data, self.rank).all_reduce(tape.books(), When::Now, moe.experts as u64 * 8);
        }
        for ((_y, said), moe) in said.into_iter().zip(moe.into_iter().cycle()) {
            tape.books().part.set(Part::Routing);
            for (part, weight) in [(said.balance, moe.balance_weight), (said.z, moe.z_weight)] {
                if weight != 0.0 {
                    loss = loss.add(&part.scaled());
                }
            }
        }
        loss
    }

    fn hidden(self: &Rc<Model>, tape: &Tape, stream: &Stream) -> (Var, Vec<(Var, super::moe::Said)>) {
        tape.books().part.set(Part::Embedding);
        if self.task.sizes.moe.as_ref().is_some_and(|moe| moe.selector().competes()) {
            self.task.group(Axis::Data, self.rank).all_gather(tape.books(), 16);
        }
        let spans = self.spans(tape, stream);
        let mut x = self.dropped(self.residency.within(0, tape, || self.embedding(tape, stream)));
        let mut all = Vec::new();
        for index in 0..self.blocks.len() {
            let block = || {
                let (model, stream, spans) = (self.clone(), *stream, spans.clone());
                let run = move |inputs: &[Var]| {
                    let (y, said) = model.block(index, &inputs[0], &stream, &spans);
                    [y].into_iter().chain(said.map(|said| [said.balance, said.z]).into_iter().flatten()).collect()
                };
                tape.checkpoint(Segment::Block, &[&x], run)
            };
            let outputs = self.residency.within(1 + index, tape, block);
            x = outputs[0].clone();
            if let [y, balance, z] = &outputs[..] {
                // The block's value waits with what its layer says.
                all.push((y.clone(), super::moe::Said { balance: balance.clone(), z: z.clone() }));
            }
        }
        (x, all)
    }

    /// Which tokens see each other, and where they stand.
    fn spans(&self, tape: &Tape, stream: &Stream) -> Vec<Array> {
        let model = &self.task.sizes.model;
        let array = |cols| Array::new(tape.books(), Cause::Activations, (stream.tokens, cols), Dtype::U32);
        match model.family.positions() {
            Positions::Rotary => {
                let half = (model.d_model / model.heads) as u64 / 2;
                vec![array(2), array(half), array(half)]
            }
            Positions::Learned => vec![array(2)],
            Positions::Relative => vec![array(1), array(1)],
        }
    }

    fn embedding(&self, tape: &Tape, stream: &Stream) -> Var {
        let dtype = self.task.sizes.dtype;
        let x = stream.sum_of_parts(on(tape, &self.tokens).embed(stream.tokens, dtype));
        let relative = self.task.sizes.model.family.positions() == Positions::Relative;
        let x = if relative { x.scaled() } else { x };
        let x = match &self.positions {
            Some(table) => x.add(&on(tape, table).embed(stream.here(), dtype)),
            None => x,
        };
        self.embedding_norm.as_ref().map_or(x.clone(), |norm| norm.forward(&x))
    }

    fn dropped(&self, x: Var) -> Var {
        if self.task.sizes.model.dropout == 0.0 { x } else { x.dropout() }
    }

    fn block(&self, index: usize, x: &Var, stream: &Stream, spans: &[Array]) -> (Var, Said) {
        let (block, books) = (&self.blocks[index], x.tape.books());
        let mut said = None;
        books.part.set(Part::Attention);
        let attend = |x: &Var| block.attention.forward(&self.task.sizes, x, (stream, spans));
        let x = self.around(&block.norms[0], x, |x| self.dropped(attend(x)));
        books.part.set(Part::FeedForward);
        let x = self.around(&block.norms[1], &x, |x| self.dropped(self.feed_forward(block, x, stream, &mut said)));
        (x, said)
    }

    fn around(&self, norm: &Norm, x: &Var, f: impl FnOnce(&Var) -> Var) -> Var {
        match self.task.sizes.norms() {
            NormPlace::Before => x.add(&f(&norm.forward(x))),
            NormPlace::After => norm.forward(&x.add(&f(x))),
        }
    }

    fn feed_forward(&self, block: &Block, x: &Var, stream: &Stream, said: &mut Said) -> Var {
        match &block.feed_forward {
            FeedForward::Dense(dense) => {
                let [first, second] = &**dense;
                let hidden = first.forward(&stream.parts_of(x));
                let (second, activation) = (second.parts(&x.tape, stream), self.task.sizes.activation());
                let run = move |hidden: &Var, second: &[Var]| product(&activated(activation, hidden), second);
                stream.sum_of_parts(x.tape.segment(Segment::Activation, &hidden, &second, run))
            }
            FeedForward::Moe(layer) => {
                let (y, output) = layer.forward(x, stream, &self.task, (block.index, &self.load));
                *said = Some(output);
                y
            }
        }
    }

    fn head_loss(&self, x: &Var, stream: &Stream, predicted: u64) -> Var {
        let weight = on(&x.tape, self.head.as_ref().unwrap_or(&self.tokens));
        let bias = self.head_bias.as_ref().map(|bias| on(&x.tape, bias));
        let (group, books) = (stream.group, x.tape.books().clone());
        let told = |rows: u64| group.all_gather(&books, rows * 3 * 4);
        let loss = |x: &Var| x.linear_cross_entropy((&weight, bias.as_ref()), group.size, told);
        let Some((dense, norm)) = &self.transform else { return loss(&stream.parts_of(x)) };
        let x = norm.forward(&dense.forward(&stream.whole_of(x).gather_rows(predicted)).activation());
        loss(&stream.whole(predicted).parts_of(&x))
    }
}

pub(super) fn activated(activation: Activation, hidden: &Var) -> Var {
    match activation {
        Activation::Gelu | Activation::Relu => hidden.activation(),
        Activation::SwiGlu => hidden.swiglu(),
    }
}

impl Block {
    fn new(builder: &Builder, index: usize) -> Block {
        let first = Norm::new(builder, true);
        let attention = Attention::new(builder);
        let second = Norm::new(builder, true);
        let feed_forward = match builder.task.sizes.moe_of(index) {
            Some(moe) => FeedForward::Moe(Box::new(Moe::new(builder, index, moe))),
            None => FeedForward::dense(builder),
        };
        Block { index, norms: [first, second], attention, feed_forward }
    }
}

impl FeedForward {
    fn dense(builder: &Builder) -> FeedForward {
        let sizes = &builder.task.sizes;
        let (d, f, activation) = (sizes.model.d_model as u64, builder.cut(sizes.d_ff() as u64), sizes.activation());
        let wide = if activation == Activation::SwiGlu { 2 * f } else { f };
        let linear = |outputs, inputs| Linear::of_outputs(builder, (outputs, inputs), activation.has_biases());
        FeedForward::Dense(Box::new([linear(wide, d), linear(d, f)]))
    }
}
