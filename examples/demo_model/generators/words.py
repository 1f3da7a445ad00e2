"""Word lists that the generators draw from. Plain data: it knows nothing of skills, templates or tokens."""

NOUNS = """apple anchor arrow badge banana basket beach bell berry bike bird boat book bottle box bread bridge brush
bucket bus butter button cactus cake camel camera candle car carpet castle cat chair cheese cherry circle clock cloud
coat coffee coin comet copper corn cow crab crown cup curtain desert desk diamond dog dolphin door dragon dress drum
duck eagle egg elephant engine falcon farm feather fence field finger fire fish flag flower flute forest fork fox frog
garden gate ghost giraffe glass glove goat gold grape grass guitar hammer harbor hat hawk heart helmet hill honey horse
hotel house ice igloo ink iron island jacket jar jelly jewel juice jungle kettle key king kite kitten knife ladder lake
lamp leaf lemon letter lion lizard mango map maple market mask meadow melon milk mirror monkey moon mountain mouse
mushroom needle nest night north nut oak ocean olive onion orange orchid otter owl paint palace panda paper parrot peach
pear pen pencil pepper piano picture pillow pilot pine pizza planet plate plum pocket pond potato queen quilt rabbit
radio rain raven ribbon rice ring river robot rocket rope rose sail salt sand school seed shadow shark sheep ship shirt
shoe silver sky snake snow soap soup spider spoon spring square star stone storm street sugar summer sun swan table
tea tent tiger tomato tower train tree truck tulip turtle umbrella valley vase violin wagon wall watch water whale
wheel wind window winter wolf wood yarn zebra""".split()

ADJECTIVES = """amber angry blue bold brave bright brown calm clean clever cold cool crazy dark deep dry early fancy fast
fresh funny gentle giant golden grand green grey happy heavy hidden hot huge kind large lazy light little long lucky
mad mellow new nice noble old pale pink plain polite proud purple quick quiet rapid red rich round royal sad sharp shiny
short silent silver simple slow small smart soft solid sour strong sunny sweet swift tall thin tiny warm white wide wild
wise yellow young""".split()

NAMES = """Adam Alice Anna Ben Carla Carlos Chen Clara Daniel David Diego Elena Emma Eric Eva Felix Fiona George Grace
Hana Henry Hugo Ivan Jack James Jane Julia Karim Kate Laura Leo Lily Lina Lucas Maria Mark Maya Mia Mike Nina Noah
Nora Olga Oliver Omar Paul Peter Rosa Ruth Sam Sara Sofia Tom Vera Victor Wei Yuki Yusuf Zoe""".split()

CITIES = """Athens Beijing Berlin Boston Cairo Chicago Delhi Denver Dublin Geneva Hanoi Helsinki Istanbul Jakarta Kyoto
Lagos Lima Lisbon London Madrid Manila Miami Milan Moscow Munich Nairobi Oslo Paris Prague Rome Seattle Seoul Shanghai
Sydney Tokyo Toronto Vienna Warsaw Zurich""".split()

LONG_CITIES = (
    "San Francisco",
    "New York",
    "Los Angeles",
    "Hong Kong",
    "Buenos Aires",
    "Mexico City",
    "Cape Town",
    "New Delhi",
)

COLOURS = "black blue brown green grey orange pink purple red silver white yellow".split()

COUNTRIES = """Brazil Canada China Egypt France Germany India Italy Japan Kenya Mexico Norway Peru Poland Spain Sweden
Turkey Vietnam""".split()

VERBS = """add archive book cancel check clean close convert copy count create delete download find fix get list load lock
mark measure merge move open order pause play print read rename reset reserve resize run save scan schedule search
send set share show sort start stop store sync tag test track unlock update upload water""".split()

OBJECTS = """account album alarm badge battery bill camera card channel client device disk door driver email engine event
field file filter flight folder garden group heater image invoice job lamp letter lock map meeting menu message metric
motor note order page parcel payment photo plan playlist printer profile project queue recipe record report room route
sensor server shelf shop song speaker table task team ticket timer token train user vehicle video wallet window""".split()

ZH_NOUNS = """苹果 香蕉 橙子 葡萄 西瓜 桌子 椅子 窗户 房子 汽车 火车 飞机 轮船 老虎 狮子 大象 熊猫 兔子 猴子 小鸟 月亮 太阳
星星 大海 高山 河流 森林 花园 书本 铅笔 手机 电脑 电话 音乐 电影 咖啡 牛奶 面包 鸡蛋 米饭 雨伞 帽子 衣服 鞋子 城市 学校 医院
商店 银行 公园""".split()

ZH_NAMES = "小明 小红 小华 小丽 小强 李雷 韩梅 王芳 张伟 刘洋 陈静 杨帆 赵敏 周杰 吴刚 孙丽".split()

ZH_CITIES = (
    "北京 上海 广州 深圳 杭州 南京 成都 重庆 武汉 西安 苏州 天津 长沙 青岛 大连 厦门 东京 巴黎 伦敦 纽约".split()
)

ZH_COLOURS = "红色 蓝色 绿色 黄色 白色 黑色 紫色 粉色".split()

NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()

COMMON = """hello world strawberry computer science language model people place thing morning evening friend family mother
father brother sister teacher student doctor summer holiday birthday picture number letter question answer problem
kitchen bedroom chocolate elephant butterfly beautiful different important interesting government business company
mississippi banana coffee orange yellow purple happy little animal country history music science program python random
expert router tensor kernel cache token server engine memory weight matrix vector""".split()

_ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr pl st tr".split()
_VOWELS = "a e i o u ai ea oo".split()
_CODAS = ["", "", "n", "r", "s", "l", "m", "t", "x", "k"]


def pseudo_word(rng) -> str:
    """A pronounceable word that no list holds, so that copying does not depend on a known vocabulary."""
    syllables = rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def any_word(rng) -> str:
    """A list word most of the time, else an invented one."""
    return pseudo_word(rng) if rng.random() < 0.2 else rng.choice(NOUNS)


def distinct(rng, draw, count: int) -> list[str]:
    """`count` different results of `draw(rng)`, in the order drawn."""
    seen: dict[str, None] = {}
    while len(seen) < count:
        seen.setdefault(draw(rng))
    return list(seen)
